"""The buffer's decisions: which state every group is in, and which groups a step takes.

Owns the ledger states. Every group ever issued is in exactly one of: running, scoring, ready, taken, trained, dropped(reason),
failed(reason); `issued` is the sum of all, always. Running, scoring and ready groups are `Group`s; taken and trained ones are the
group ids of their step; dropped and failed ones are a count by reason. A group that is scored and teaches nothing
(buffer/screening.py) is dropped instead of becoming ready, and its prompt is not issued again. Which of the ready ones a step
takes is worked out in buffer/ready_groups.py.

Invariants (`check_invariants`): conservation; a step has exactly B groups and no group is in two steps; steps are taken in order,
without a gap; a step once taken keeps its groups for ever, so that it can be repeated after the learner died; no trained token is
older than eta at its step, under any policy, whatever happened.

Pure: `handle(event, now) -> list[instruction]`. Called by buffer/buffer.py and by plan/simulate.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

from asyncrl.algorithms.screening import NO_PAIR
from asyncrl.buffer.books import STALE, BufferLimits, Counts, Policy, ReasonCounts, StepRecord
from asyncrl.buffer.events import (
    BufferEvent,
    BufferInstruction,
    ExternalGroupAdded,
    GeneratorGone,
    GroupDropped,
    GroupIssued,
    GroupMoved,
    GroupPlaced,
    GroupState,
    LearnerRestarted,
    MemberState,
    Reissue,
    ReturnPrompt,
    SampleFailed,
    SampleFinished,
    SampleScored,
    ScoreMember,
    StepsForgotten,
    StepTrained,
    TakeGroups,
    TakeStep,
)
from asyncrl.buffer.group import Group
from asyncrl.buffer.invariants import check_group, check_steps
from asyncrl.buffer.ready_groups import ReadyGroups
from asyncrl.buffer.screening import Screening
from asyncrl.buffer.staleness import staleness_figures
from asyncrl.buffer.steps import TakenSteps

__all__ = ["STALE", "BufferLimits", "BufferState", "Counts", "Policy", "StepRecord"]


class BufferState:
    """The state machine.

    Args:
        limits: B, eta, policy and the rest.

    Example:
        >>> state = BufferState(BufferLimits(groups_per_step=1, max_staleness=0))
        >>> _ = state.handle(GroupIssued(0, "p", 1, "generator-0", 0), now=0.0)
        >>> _ = state.handle(SampleFinished(0, 0, ((0, 5),)), now=1.0)
        >>> _ = state.handle(SampleScored(0, 0), now=2.0)
        >>> state.handle(TakeStep(0), now=3.0)[-1].group_ids
        (0,)
    """

    def __init__(self, limits: BufferLimits) -> None:
        self.limits = limits
        self.groups: dict[int, Group] = {}
        """Running, scoring and ready groups by id, in order of issue."""
        self.next_group_id = 0
        self.returned: dict[int, int] = {}
        """Dropped and failed groups whose prompt waits to be issued again, and how often it failed."""
        self._ready = ReadyGroups(limits)
        self._screening = Screening(limits)
        self._taken = TakenSteps()
        self._dropped = ReasonCounts()
        self._failed = ReasonCounts()
        self._story: deque[tuple[float, BufferEvent]] = deque(maxlen=256)
        self._handlers: dict[type, Callable[[Any, float], list[BufferInstruction]]] = {
            GroupIssued: self._group_issued,
            GroupPlaced: self._group_placed,
            ExternalGroupAdded: self._external_group_added,
            SampleFinished: self._sample_finished,
            SampleScored: self._sample_scored,
            SampleFailed: self._sample_failed,
            GeneratorGone: self._generator_gone,
            TakeStep: self._take_step,
            StepTrained: self._step_trained,
            LearnerRestarted: self._learner_restarted,
            GroupDropped: self._group_dropped,
            StepsForgotten: self._steps_forgotten,
        }

    def handle(self, event: BufferEvent, now: float) -> list[BufferInstruction]:
        """Take note of `event` and return what follows from it, in order.

        Repeats are harmless: a sample, score or failure of a member that is past it, or of a group that is over, changes nothing.

        Raises:
            AssertionError: The event cannot follow what happened before; the message tells the group's recent story.
        """
        self._story.append((now, event))
        return self._handlers[type(event)](event, now)

    def restore(
        self,
        groups: Iterable[Group],
        steps: Iterable[StepRecord],
        *,
        next_group_id: int,
        dropped: dict[str, int],
        failed: dict[str, int],
        returned: dict[int, int],
        forgotten_steps: int,
    ) -> None:
        """Fill an empty machine from a ledger; running groups are with nobody and must be placed again."""
        assert self.next_group_id == 0, "restore is for an empty machine"
        self.groups = {group.group_id: group for group in groups}
        self.next_group_id = next_group_id
        self.returned = dict(returned)
        self._taken.restore(steps, forgotten_steps=forgotten_steps, groups_per_step=self.limits.groups_per_step)
        self._dropped, self._failed = ReasonCounts(dropped), ReasonCounts(failed)
        for group in self.groups.values():
            group.attempt += group.state == "running"
            group.generator = "" if group.state == "running" else group.generator
            if group.state == "ready":
                group.settle(self.limits.screen)
        self._ready.restore(group for group in self.groups.values() if group.state == "ready")

    @property
    def steps(self) -> dict[int, StepRecord]:
        """Taken and trained steps that may still be repeated."""
        return self._taken.records

    @property
    def next_step(self) -> int:
        """Return the steps taken so far; the next new one."""
        return self._taken.next_step

    # -- questions -------------------------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        """Return the groups per state."""
        live = Counter(group.state for group in self.groups.values())
        taken, trained = self._taken.num_groups
        return Counts(
            issued=self.next_group_id,
            running=live["running"],
            scoring=live["scoring"],
            ready=live["ready"],
            taken=taken,
            trained=trained,
            dropped=dict(self._dropped.counts),
            failed=dict(self._failed.counts),
        )

    def member_state(self, group_id: int, index: int) -> MemberState | Literal["over", "unknown"]:
        """Return where a member stands; `over` where its group is taken, trained, dropped or failed."""
        group = self.groups.get(group_id)
        if group is None:
            return "over" if 0 <= group_id < self.next_group_id else "unknown"
        return group.members[index] if 0 <= index < group.size else "unknown"

    def has_place(self, version: int) -> bool:
        """Return whether one more group with tokens as old as `version` can be held and still be trained in time."""
        held = len(self.groups) + self.next_step * self.limits.groups_per_step
        return (version + self.limits.max_staleness + 1) * self.limits.groups_per_step - held > 0

    def unplaced(self) -> list[Reissue]:
        """Return what must be handed out again and is with nobody, oldest first."""
        waiting = [group for group in self.groups.values() if group.state == "running" and not group.generator]
        return [Reissue(group.group_id, group.attempt, group.pending, group.version) for group in waiting]

    def unscored(self) -> list[ScoreMember]:
        """Return every member that is generated and has no score yet."""
        return [ScoreMember(group.group_id, index) for group in self.groups.values() for index in group.unscored]

    def steps_to_repeat(self) -> tuple[int, ...]:
        """Return the steps taken and not (or no longer) trained, in order."""
        return self._taken.to_repeat()

    def story(self, group_id: int) -> str:
        """Return the recent events that name this group, one a line."""
        told = [f"{now:.3f} {event}" for now, event in self._story if getattr(event, "group_id", None) == group_id]
        return "\n".join(told) or "(nothing recent)"

    def check_invariants(self) -> None:
        """Raise AssertionError where the books do not balance."""
        counts = self.counts()
        assert counts.total == counts.issued, f"{counts.issued} groups issued, but {counts}"
        check_steps(self.steps, self.next_step, self.limits)
        assert not self.groups.keys() & self._taken.group_ids, "a taken group is still live"
        self._ready.check(self.next_step, self.groups)
        for group in self.groups.values():
            assert group.group_id < self.next_group_id, f"{group} was never issued"
            check_group(group, self.story(group.group_id))

    # -- groups ----------------------------------------------------------------------------------------------------------

    def _group_issued(self, event: GroupIssued, now: float) -> list[BufferInstruction]:
        assert event.group_id == self.next_group_id, f"group ids have no gap: {self.next_group_id} is next, not {event.group_id}"
        retries = self.returned.pop(event.replaces, 0) if event.replaces is not None else 0
        self.next_group_id += 1
        self.groups[event.group_id] = Group(
            event.group_id,
            event.prompt_id,
            event.size,
            event.version,
            now,
            generator=event.generator,
            retries=retries,
        )
        return []

    def _group_placed(self, event: GroupPlaced, _: float) -> list[BufferInstruction]:
        group = self._running(event.group_id)
        group.generator = event.generator
        group.version = min(group.version, event.version)
        group.refresh_age()
        self._ready.group_placed()
        return []

    def _external_group_added(self, event: ExternalGroupAdded, now: float) -> list[BufferInstruction]:
        assert event.group_id == self.next_group_id, f"group ids have no gap: {self.next_group_id} is next, not {event.group_id}"
        self.next_group_id += 1
        group = Group(
            event.group_id,
            event.prompt_id,
            len(event.version_counts),
            min(counts[0][0] for counts in event.version_counts),
            now,
            generator=event.submitter,
            external=True,
            members=["generated"] * len(event.version_counts),
            version_counts=list(event.version_counts),
            truncated=set(event.truncated),
        )
        self.groups[event.group_id] = group
        return [*(ScoreMember(group.group_id, index) for index in group.unscored), self._move(group, "scoring", now)]

    def _generator_gone(self, event: GeneratorGone, now: float) -> list[BufferInstruction]:
        instructions: list[BufferInstruction] = []
        for group in list(self.groups.values()):
            if group.state != "running" or group.generator != event.generator:
                continue
            group.generator = ""
            group.attempt += 1
            group.losses += 1
            if group.losses <= self.limits.max_group_retries:
                instructions.append(Reissue(group.group_id, group.attempt, group.pending, group.version))
                continue
            reason = f"generator died {group.losses} times"
            for index in group.pending:
                instructions += self._sample_failed(SampleFailed(group.group_id, index, reason), now)
        return instructions

    def _group_dropped(self, event: GroupDropped, now: float) -> list[BufferInstruction]:
        group = self.groups.get(event.group_id)
        assert group is not None, f"group {event.group_id} is not live\n{self.story(event.group_id)}"
        return self._end(group, "dropped", event.reason, now)

    # -- members ---------------------------------------------------------------------------------------------------------

    def _sample_finished(self, event: SampleFinished, now: float) -> list[BufferInstruction]:
        group = self.groups.get(event.group_id)
        if group is None or group.members[event.index] != "pending":
            return []
        group.members[event.index] = "generated"
        group.version_counts[event.index] = event.version_counts
        if event.truncated:
            group.truncated.add(event.index)
        instructions: list[BufferInstruction] = [ScoreMember(event.group_id, event.index)]
        return instructions + self._advance(group, now)

    def _sample_scored(self, event: SampleScored, now: float) -> list[BufferInstruction]:
        group = self.groups.get(event.group_id)
        if group is None or group.members[event.index] != "generated":
            return []
        group.members[event.index] = "scored"
        group.rewards[event.index] = event.reward
        if self._is_past_saving(group):
            return self._end(group, "dropped", STALE, now)
        return self._advance(group, now)

    def _sample_failed(self, event: SampleFailed, now: float) -> list[BufferInstruction]:
        group = self.groups.get(event.group_id)
        if group is None or group.members[event.index] not in {"pending", "generated"}:
            return []
        greedy = self.limits.screen.greedy_index
        if not 0 <= greedy < group.size or group.members[greedy] != "failed":
            group.last_failure = event.reason
        group.members[event.index] = "failed"
        return self._advance(group, now)

    def _advance(self, group: Group, now: float) -> list[BufferInstruction]:
        """Move a group on as far as its members allow."""
        if "pending" in group.members:
            return []
        oldest = group.oldest
        group.refresh_age()
        if group.oldest != oldest:
            self._ready.grew_older(group.group_id)
        if "generated" in group.members:
            return [self._move(group, "scoring", now)] if group.state == "running" else []
        if reason := group.shortage(self.limits.min_group_members, self.limits.screen.greedy_index):
            return self._end(group, "failed", reason, now)
        return self._screened(group, now)

    def _screened(self, group: Group, now: float) -> list[BufferInstruction]:
        reason, said = self._screening.judge(group)
        if reason:
            return [*said, *self._end(group, "dropped", reason, now, returns=False)]
        return [*said, self._move(group, "ready", now)]

    def _is_past_saving(self, group: Group) -> bool:
        """Return whether a group that is still being generated would be dropped as stale whenever it is ready."""
        limits = self.limits
        return limits.policy == "drop" and group.is_past_saving(self.next_step - limits.max_staleness, limits.screen)

    def _move(self, group: Group, after: GroupState, now: float) -> GroupMoved:
        before, group.state = group.state, after
        if after == "ready":
            group.ready_s = now
            self._ready.add(group)
        return GroupMoved(group.group_id, before, after)

    def _end(
        self, group: Group, after: Literal["dropped", "failed"], reason: str, _: float, *, returns: bool = True
    ) -> list[BufferInstruction]:
        del self.groups[group.group_id]
        self._ready.ended(group.group_id)
        (self._dropped if after == "dropped" else self._failed).add(reason)
        at_work = group.generator if group.pending else ""
        instructions: list[BufferInstruction] = [GroupMoved(group.group_id, group.state, after, reason, at_work)]
        retries = group.retries + (after == "failed")
        if returns and self.limits.reissue_dropped and not group.external and retries <= self.limits.max_group_retries:
            self.returned[group.group_id] = retries
            instructions.append(ReturnPrompt(group.group_id, group.prompt_id))
        return instructions

    def _running(self, group_id: int) -> Group:
        group = self.groups.get(group_id)
        assert group is not None, f"group {group_id} is not live\n{self.story(group_id)}"
        assert group.state == "running", f"{group}\n{self.story(group_id)}"
        return group

    # -- steps -----------------------------------------------------------------------------------------------------------

    def _take_step(self, event: TakeStep, now: float) -> list[BufferInstruction]:
        if event.step < self.next_step:
            return [self._taken.repeat(event.step)]
        assert event.step == self.next_step, f"step {self.next_step} is next, not {event.step}"
        instructions: list[BufferInstruction] = []
        for group in self._ready.unfit(event.step):
            returns = bool(group.trained)
            instructions += self._end(group, "dropped", STALE if returns else NO_PAIR, now, returns=returns)
        chosen = self._ready.choose(event.step, self.groups)
        if not isinstance(chosen, tuple):
            return [*instructions, chosen]
        taken = self._take(event.step, chosen, now)
        for group in [group for group in self.groups.values() if self._is_past_saving(group)]:
            instructions += self._end(group, "dropped", STALE, now)
        return [*instructions, taken]

    def _take(self, step: int, group_ids: tuple[int, ...], now: float) -> TakeGroups:
        groups = self._ready.take(group_ids)
        for group_id in group_ids:
            del self.groups[group_id]
        mask_below = max(0, step - self.limits.max_staleness) if self.limits.policy == "mask" else 0
        figures = staleness_figures(
            step,
            (counts for group in groups for counts in group.trainable_counts),
            mask_below=mask_below,
            queue_s=[now - group.ready_s for group in groups],
        )
        assert figures.token_max <= self.limits.max_staleness, f"step {step} would train a token {figures.token_max} versions old"
        self._taken.enter(StepRecord(step, group_ids, mask_below, figures.token_max))
        return TakeGroups(step, group_ids, mask_below, replay=False, staleness=figures)

    def _step_trained(self, event: StepTrained, _: float) -> list[BufferInstruction]:
        return list(self._taken.mark_trained(event.step))

    def _learner_restarted(self, event: LearnerRestarted, _: float) -> list[BufferInstruction]:
        self._taken.go_back_to(event.version)
        self._ready.look_again()
        return []

    def _steps_forgotten(self, event: StepsForgotten, _: float) -> list[BufferInstruction]:
        self._taken.forget(event.before_step)
        return []
