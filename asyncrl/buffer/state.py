"""The buffer's decisions: which state each group is in, which generator gets the next group, and which groups a step takes.

Every group ever issued is in exactly one of: running, scoring, ready, taken, trained, dropped(reason), failed(reason); `issued`
is always the sum of all. Running, scoring and ready groups are `Group`s. Of taken and trained groups only the ids are kept, in
the record of their step; of dropped and failed groups only a count by reason. Parts of this machine are in other files: group.py
(one group's state, and which groups a step takes) and admission.py (which generator gets the next group).

Invariants (`check_invariants`): no group is lost or counted twice; a step has exactly B groups and no group is in two steps;
steps are taken in order, without a gap; a taken step keeps its groups, so that it can be repeated after the learner died (unless
it is set aside); under every policy, no trained token is more than eta versions old at its step; a group that is handed out again
keeps its place, goes before new groups, oldest first, and only to a generator whose version is at least the group's.

Pure: `handle(event, now) -> list[instruction]`; `next_issue()` returns what may be handed out now.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import asyncrl.buffer.group as gr
from asyncrl.algorithms.screening import NO_PAIR, surely_trained
from asyncrl.buffer import events as ev
from asyncrl.buffer.admission import Generator, GeneratorPool, Lead
from asyncrl.buffer.events import BufferInstruction, GroupMoved, GroupState, MemberState
from asyncrl.buffer.group import STALE, BufferLimits, Counts, Group, GroupsRestored, StepRecord
from asyncrl.observe.machine import Machine


class BufferState(Machine[ev.BufferEvent, BufferInstruction]):
    """The state machine of all groups of one run.

    Args:
        limits: B (groups per step), eta (max_staleness), the policy and the other bounds.

    Example:
        >>> state = BufferState(BufferLimits(groups_per_step=1, max_staleness=0))
        >>> _ = state.handle(ev.GeneratorReady("generator-0", num_slots=1, version=0), now=0.0)
        >>> state.next_issue()
        IssueGroup(generator='generator-0', version=0)
        >>> _ = state.handle(ev.GroupIssued(0, "p", 1, "generator-0", 0), now=0.0)
        >>> _ = state.handle(ev.SamplesFinished(0, (0,), (((0, 5),),)), now=1.0)
        >>> _ = state.handle(ev.SamplesScored(0, (0,), (1.0,)), now=2.0)
        >>> state.handle(ev.TakeStep(0), now=3.0)[-1].group_ids
        (0,)
    """

    name = "buffer"

    def __init__(self, limits: BufferLimits) -> None:
        self.limits = limits
        self.pool = GeneratorPool()
        self.lead = Lead(limits)
        self.paused = False
        self.groups: dict[int, Group] = {}
        """Running, scoring and ready groups by id, in order of issue."""
        self.next_group_id = 0
        self.returned: dict[int, int] = {}
        """Dropped and failed groups whose prompt waits to be issued again, by id: how often that prompt has failed."""
        self.steps: dict[int, StepRecord] = {}
        """Taken and trained steps that may still be repeated."""
        self.next_step = 0
        """The next new step; also the number of steps taken so far."""
        self._unplaced: set[int] = set()
        """Running groups that are with no generator now."""
        self._ready: dict[int, Group] = {}
        """Those of `groups` that are ready."""
        self._taken_s: float | None = None
        self._trained_s = 0.0
        """When a new step was last taken, and when a step was last trained. `_taken_s` is None where the last time does not help
        to predict the next, as after a pause."""
        self._num_objected = 0
        """Consecutive groups that the screen refused, in this process; 0 again once it accepts one."""
        self._num_forgotten_groups = 0
        self._dropped, self._failed = Counter[str](), Counter[str]()
        self._story: deque[tuple[float, ev.BufferEvent]] = deque(maxlen=256)
        self._handlers: dict[type, Callable[[Any, float], list[BufferInstruction]]] = {
            ev.GroupIssued: self._group_issued,
            ev.GroupPlaced: self._group_placed,
            ev.SamplesFinished: self._samples_finished,
            ev.SamplesScored: self._samples_scored,
            ev.SampleFailed: self._sample_failed,
            ev.GeneratorGone: self._generator_gone,
            ev.TakeStep: self._take_step,
            ev.StepTrained: self._step_trained,
            ev.LearnerRestarted: self._learner_restarted,
            ev.GroupDropped: self._group_dropped,
            ev.StepsForgotten: self._steps_forgotten,
            ev.StepSetAside: self._step_set_aside,
        }

    def _decide(self, event: ev.BufferEvent, now: float) -> list[BufferInstruction]:
        """Repeats are harmless: an event for an earlier state of a member, or for a group that is over, changes nothing."""
        if handler := self._handlers.get(type(event)):
            self._story.append((now, event))
            return handler(event, now)
        match event:
            case ev.GeneratorReady(name, num_slots, version):
                self.pool.put(Generator(name, num_slots, version))
            case ev.GeneratorLeaving(name):
                self.pool.change(name, is_leaving=True)
            case ev.RoomChanged(name, num_slots):
                self.pool.change(name, num_slots=num_slots)
            case ev.VersionIsLive(name, version):
                self.pool.change(name, version=version)
            case ev.MembersStarted(name, num_members):
                self.pool.change(name, add_members=num_members)
            case ev.MembersFinished(name, num_members):
                self.pool.change(name, add_members=-num_members)
            case ev.IssuePaused() | ev.IssueResumed():
                self.paused, self._taken_s = isinstance(event, ev.IssuePaused), None
            case ev.BoundsChanged(max_staleness, max_groups):
                self.limits = replace(self.limits, max_staleness=max_staleness, max_groups=max_groups)
                self.lead.follow(self.limits)
            case GroupsRestored():
                self._restore(event)
            case _:
                raise AssertionError(f"{event} is no event of the buffer")
        return []

    def _restore(self, held: GroupsRestored) -> None:
        """Fill an empty machine from a ledger; its running groups are with no generator and are handed out again."""
        assert self.next_group_id == 0, "only an empty machine is filled from a ledger"
        self.groups = {group.group_id: replace(group) for group in held.groups}  # the event stays as it was told
        self.next_group_id = held.next_group_id
        self.returned = dict(held.returned)
        self.steps = {record.step: replace(record) for record in held.steps}
        self.next_step = max(self.steps, default=held.forgotten_steps - 1) + 1
        self._num_forgotten_groups = held.forgotten_steps * self.limits.groups_per_step
        for counts, before in ((self._dropped, held.dropped), (self._failed, held.failed)):
            for reason, num_groups in Counter(before).most_common():
                gr.count_reason(counts, reason, num_groups)
        for group in self.groups.values():
            if group.state == "running":
                group.attempt, group.generator, group.holders = group.attempt + 1, "", {}
                self._unplaced.add(group.group_id)
            elif group.state == "ready":
                group.settle(group.judged, self.limits.screen)
        self._ready = {group_id: group for group_id, group in self.groups.items() if group.state == "ready"}

    # -- questions -------------------------------------------------------------------------------------------------------

    def next_issue(self) -> ev.IssueGroup | ev.ReissueGroup | None:
        """Return which group to hand out next and to which generator, or None. Call again after GroupIssued or GroupPlaced."""
        if self.paused:
            return None
        for group_id in sorted(self._unplaced):
            if generator := self.pool.best(max(self.groups[group_id].version, 0)):
                return ev.ReissueGroup(group_id, generator.name, generator.version)
        if self.capacity(self.pool.newest_version) <= 0:
            return None
        # The rule allows every version from a lowest one on; a division gives that lowest version.
        lowest = (self._num_held - self.lead.groups) // self.limits.groups_per_step
        generator = self.pool.best(max(lowest, 0))
        if generator is None or self.capacity(generator.version) <= 0:
            return None
        return ev.IssueGroup(generator.name, generator.version)

    def capacity(self, version: int) -> int:
        """Return how many more groups may start with tokens of `version`, not counting free slots; may be negative.

        Source: AReaL (arXiv 2505.24298), staleness control of the rollout controller, where the lead is max_staleness * B groups.
        """
        limits, num_held = self.limits, self._num_held
        free = (version + 1) * limits.groups_per_step + self.lead.groups - num_held
        if limits.max_running_groups:
            free = min(free, limits.max_running_groups - (len(self.groups) - len(self._ready)))
        return free if limits.max_groups is None else min(free, limits.max_groups - num_held)

    def has_place(self, version: int) -> bool:
        """Return whether one more group with tokens of `version` can be held and still be trained within the staleness bound."""
        return (version + self.limits.max_staleness + 1) * self.limits.groups_per_step > self._num_held

    @property
    def is_full(self) -> bool:
        """Return whether no more groups can be held, even with free slots, until a group is trained or dropped."""
        most = self.limits.max_groups
        return not self.has_place(self.pool.newest_version) or (most is not None and self._num_held >= most)

    @property
    def _num_held(self) -> int:
        """Return the number of groups that hold a place: all except dropped and failed ones."""
        return len(self.groups) + self.next_step * self.limits.groups_per_step

    def why_nothing_is_issued(self) -> str:
        """Return as text why no group is issued now; empty when one could be."""
        held, newest, limits = self._num_held, self.pool.newest_version, self.limits
        allowed = (newest + limits.max_staleness + 1) * limits.groups_per_step
        lead, led = self.lead.versions, (newest + 1) * limits.groups_per_step + self.lead.groups
        reasons = (
            (self.paused, "paused"),
            (not len(self.pool), "no generator is ready"),
            (newest < 0, "no generator has weights yet"),
            (limits.max_groups is not None and held >= limits.max_groups, "every group the run needs is issued"),
            (held >= allowed, f"the staleness bound: {held} groups hold a place, version {newest} allows {allowed}"),
            (held >= led, f"buffer.ahead: {held} groups hold a place, version {newest} and a lead of {lead:.1f} allow {led}"),
            (self.capacity(newest) <= 0, f"{len(self.groups) - len(self._ready)} groups are running, the most that may"),
            (self.next_issue() is None, "every generator that may get a group has its slots full"),
        )
        return next((reason for applies, reason in reasons if applies), "")

    def counts(self) -> Counts:
        """Return the number of groups in each state."""
        live = Counter(group.state for group in self.groups.values())
        steps = self.steps.values()
        return Counts(
            issued=self.next_group_id,
            running=live["running"],
            scoring=live["scoring"],
            ready=live["ready"],
            taken=sum(len(record.group_ids) for record in steps if not record.trained),
            trained=sum(len(record.group_ids) for record in steps if record.trained) + self._num_forgotten_groups,
            dropped=dict(self._dropped),
            failed=dict(self._failed),
        )

    def member_state(self, group_id: int, index: int) -> MemberState | Literal["over", "unknown"]:
        """Return a member's state; `over` where its group is taken, trained, dropped or failed."""
        group = self.groups.get(group_id)
        if group is None:
            return "over" if 0 <= group_id < self.next_group_id else "unknown"
        return group.members[index] if 0 <= index < group.size else "unknown"

    def unscored(self) -> list[ev.ScoreMembers]:
        """Return, for each group, the members that are generated but not scored yet."""
        return [ev.ScoreMembers(group.group_id, unscored) for group in self.groups.values() if (unscored := group.unscored)]

    def steps_to_repeat(self) -> tuple[int, ...]:
        """Return the steps that are taken and must be trained (or trained again), in order."""
        return tuple(step for step, record in sorted(self.steps.items()) if not record.trained)

    def story(self, group_id: int) -> str:
        """Return the recent events of this group, one per line."""
        told = [f"{now:.3f} {event}" for now, event in self._story if getattr(event, "group_id", None) == group_id]
        return "\n".join(told) or "(nothing recent)"

    def check_invariants(self) -> None:
        """Raise AssertionError where a count is wrong or two parts of the state contradict each other."""
        counts, steps = self.counts(), self.steps
        assert counts.total == counts.issued, f"{counts.issued} groups issued, but {counts}"
        assert counts.held == self._num_held, f"{self._num_held} places, but {counts}"
        assert sorted(steps) == list(range(self.next_step - len(steps), self.next_step)), f"steps {sorted(steps)}: a gap"
        taken = [group_id for record in steps.values() for group_id in record.group_ids]
        assert len(set(taken)) == len(taken), "a group is in two steps"
        for record in steps.values():
            assert len(record.group_ids) == self.limits.groups_per_step, f"{record} is not of B groups"
            assert record.max_staleness >= 0, f"{record} trained a version that did not exist"
        assert not self.groups.keys() & set(taken), "a taken group is still live"
        assert self._ready == {key: group for key, group in self.groups.items() if group.state == "ready"}, "ready is not"
        for group in self.groups.values():
            assert group.group_id < self.next_group_id, f"{group} was never issued"
            is_unplaced = group.state == "running" and not group.generator
            assert is_unplaced == (group.group_id in self._unplaced), f"{group} is with nobody, or is not"
            told = f"{group}\n{self.story(group.group_id)}"
            assert len(group.members) == len(group.version_counts) == group.size, told
            assert group.state == ("running" if group.pending else "scoring" if group.unscored else "ready"), told
            if group.state == "ready":
                assert group.scored, told
                assert group.trained is not None, told
                assert set(group.trained) <= set(group.scored), told

    # -- groups ----------------------------------------------------------------------------------------------------------

    def _group_issued(self, event: ev.GroupIssued, _: float) -> list[BufferInstruction]:
        assert event.group_id == self.next_group_id, f"group ids have no gap: {self.next_group_id} is next, not {event.group_id}"
        self.next_group_id += 1
        self.groups[event.group_id] = Group(
            event.group_id,
            event.prompt_id,
            event.size,
            event.version,
            generator=event.generator,
            retries=self.returned.pop(event.replaces, 0) if event.replaces is not None else 0,
            external=event.external,
        )
        if not event.external:
            self.pool.change(event.generator, add_members=event.size)
        return []

    def _group_placed(self, event: ev.GroupPlaced, _: float) -> list[BufferInstruction]:
        group = self.groups.get(event.group_id)
        assert group is not None, f"group {event.group_id} is not live\n{self.story(event.group_id)}"
        assert group.state == "running", f"{group}\n{self.story(event.group_id)}"
        group.generator = group.holders[group.attempt] = event.generator
        group.version = min(group.version, event.version)
        group.refresh_age()
        self._unplaced.discard(event.group_id)
        self.pool.change(event.generator, add_members=len(group.pending))
        return []

    def _generator_gone(self, event: ev.GeneratorGone, now: float) -> list[BufferInstruction]:
        self.pool.remove(event.name)
        instructions: list[BufferInstruction] = []
        for group in list(self.groups.values()):
            if group.state != "running" or group.generator != event.name:
                continue
            group.generator = ""
            group.attempt += 1
            group.losses += 1
            self._unplaced.add(group.group_id)
            if group.losses > self.limits.max_group_retries:
                for index in group.pending:
                    lost = ev.SampleFailed(group.group_id, index, f"generator died {group.losses} times")
                    instructions += self._sample_failed(lost, now)
        return instructions

    def _group_dropped(self, event: ev.GroupDropped, _: float) -> list[BufferInstruction]:
        group = self.groups.get(event.group_id)
        assert group is not None, f"group {event.group_id} is not live\n{self.story(event.group_id)}"
        return [self._end(group, "dropped", event.reason)]

    # -- members ---------------------------------------------------------------------------------------------------------

    def _samples_finished(self, event: ev.SamplesFinished, now: float) -> list[BufferInstruction]:
        if (group := self.groups.get(event.group_id)) is None:
            return []
        fresh = []
        for index, counts in zip(event.indices, event.version_counts, strict=True):
            if group.members[index] == "pending":
                group.members[index], group.version_counts[index] = "generated", counts
                fresh.append(index)
        group.truncated.update(set(event.truncated).intersection(fresh))
        return [ev.ScoreMembers(event.group_id, tuple(fresh)), *self._advance(group, now)] if fresh else []

    def _samples_scored(self, event: ev.SamplesScored, now: float) -> list[BufferInstruction]:
        if (group := self.groups.get(event.group_id)) is None:
            return []
        fresh = [pair for pair in zip(event.indices, event.rewards, strict=True) if group.members[pair[0]] == "generated"]
        for index, reward in fresh:
            group.members[index], group.rewards[index] = "scored", reward
        if not fresh:
            return []
        if self._is_past_saving(group):
            return [self._end(group, "dropped", STALE)]
        is_done = "pending" not in group.members and "generated" not in group.members
        return self._settle(group, now) if is_done else []

    def _sample_failed(self, event: ev.SampleFailed, now: float) -> list[BufferInstruction]:
        group = self.groups.get(event.group_id)
        if group is None or group.members[event.index] not in {"pending", "generated"}:
            return []
        greedy = self.limits.screen.greedy_index
        if not 0 <= greedy < group.size or group.members[greedy] != "failed":
            group.last_failure = event.reason
        group.members[event.index] = "failed"
        return self._advance(group, now)

    def _advance(self, group: Group, now: float) -> list[BufferInstruction]:
        """Move a group to its next state if its members allow it, after a member was generated or failed."""
        if "pending" in group.members:
            return []
        group.refresh_age()
        if "generated" in group.members:
            return [self._move(group, "scoring", now)] if group.state == "running" else []
        return self._settle(group, now)

    def _settle(self, group: Group, now: float) -> list[BufferInstruction]:
        """Decide whether a group is ready, dropped or failed, once none of its members is awaited."""
        scored, greedy = group.scored, self.limits.screen.greedy_index
        has_baseline = greedy >= 0
        if has_baseline and greedy not in scored:
            return [self._end(group, "failed", f"no greedy baseline: {group.last_failure or 'it has no such member'}")]
        if len(scored) - has_baseline < max(1, min(self.limits.min_group_members, group.size - has_baseline)):
            return [self._end(group, "failed", group.last_failure or "no reason given")]
        reason, self._num_objected, said = gr.judge(group, self.limits, self._num_objected)
        if reason:
            return [*said, self._end(group, "dropped", reason, returns=False)]
        return [*said, self._move(group, "ready", now)]

    def _is_past_saving(self, group: Group) -> bool:
        """Return whether a group that is still being generated would certainly be dropped as stale once it is ready."""
        if self.limits.policy != "drop" or "pending" not in group.members:
            return False
        surely = (group.version_counts[index] for index in surely_trained(group.judged, self.limits.screen))
        return any(counts is not None and counts[0][0] < self.next_step - self.limits.max_staleness for counts in surely)

    def _move(self, group: Group, after: GroupState, now: float) -> GroupMoved:
        before, group.state = group.state, after
        self._unplaced.discard(group.group_id)  # late samples can complete a group that waits to be handed out again
        if after == "ready":
            group.ready_s = now
            self._ready[group.group_id] = group
        return GroupMoved(group.group_id, before, after)

    def _end(self, group: Group, after: Literal["dropped", "failed"], reason: str, *, returns: bool = True) -> GroupMoved:
        del self.groups[group.group_id]
        self._unplaced.discard(group.group_id)
        self._ready.pop(group.group_id, None)
        gr.count_reason(self._dropped if after == "dropped" else self._failed, reason)
        retries = group.retries + (after == "failed")
        if returns and self.limits.reissue_dropped and not group.external and retries <= self.limits.max_group_retries:
            self.returned[group.group_id] = retries
        at_work = group.generator if group.pending else ""
        return GroupMoved(group.group_id, group.state, after, reason, at_work, group.prompt_id)

    # -- steps -----------------------------------------------------------------------------------------------------------

    def _take_step(self, event: ev.TakeStep, now: float) -> list[BufferInstruction]:
        step = event.step
        if step < self.next_step:
            record = self.steps.get(step)
            assert record is not None, f"step {step} cannot be repeated: steps before {min(self.steps, default=0)} are forgotten"
            assert not record.trained, f"step {step} is trained; it is repeated only after LearnerRestarted"
            return [ev.TakeGroups(step, record.group_ids, record.mask_below, repeat=True)]
        assert step == self.next_step, f"step {self.next_step} is next, not {step}"
        if event.group_ids and (refusal := self.why_not(step, event.group_ids)):
            return [ev.Wait(step, refusal)]
        instructions: list[BufferInstruction] = []
        for group in [group for group in self._ready.values() if not group.is_fit(step, self.limits)]:
            returns = bool(group.trained)
            instructions.append(self._end(group, "dropped", STALE if returns else NO_PAIR, returns=returns))
        chosen = event.group_ids or gr.choose(step, self.groups.values(), len(self._ready), self.limits)
        if not isinstance(chosen, tuple):
            return [*instructions, chosen]
        groups = [self.groups.pop(group_id) for group_id in chosen]
        for group_id in chosen:
            del self._ready[group_id]
        mask_below = max(0, step - self.limits.max_staleness) if self.limits.policy == "mask" else 0
        figures = gr.staleness_figures(
            step,
            (counts for group in groups for index in group.trained or () if (counts := group.version_counts[index])),
            mask_below=mask_below,
            queue_s=[now - group.ready_s for group in groups],
        )
        assert figures.token_max <= self.limits.max_staleness, f"step {step} would train a token {figures.token_max} versions old"
        if self._taken_s is not None and now > self._taken_s:
            waited_s = 0.0 if self.steps_to_repeat() else now - max(self._trained_s, self._taken_s)
            self.lead.step_taken(waited_s / (now - self._taken_s))
        self._taken_s = now
        self.steps[step] = StepRecord(step, chosen, mask_below, figures.token_max)
        self.next_step += 1
        late = [group for group in self.groups.values() if self._is_past_saving(group)]
        instructions += [self._end(group, "dropped", STALE) for group in late]
        return [*instructions, ev.TakeGroups(step, chosen, mask_below, staleness=figures)]

    def why_not(self, step: int, group_ids: tuple[int, ...]) -> str:
        """Return why exactly these groups cannot form a step; empty where they can."""
        limits, lowest = self.limits, max(step - self.limits.max_staleness, 0)
        if len(group_ids) != limits.groups_per_step:
            return (
                f"a step trains {limits.groups_per_step} groups (algorithm.groups_per_step), got {len(group_ids)} different ones"
            )
        for group_id in group_ids:
            group = self.groups.get(group_id)
            if group is None or group.state != "ready":
                return f"group {group_id} is not ready: it is {group.state if group else 'taken, trained, released or dropped'}"
            if not group.trained:
                return f"group {group_id} has no member to train"
            if not group.is_fit(step, limits):
                return (
                    f"group {group_id} is too old: its oldest token is of version {group.oldest}, and step {step} trains none of "
                    f"before version {lowest} (buffer.max_staleness = {limits.max_staleness}); train another group"
                )
        return ""

    def _step_trained(self, event: ev.StepTrained, now: float) -> list[BufferInstruction]:
        record = self.steps.get(event.step)
        if record is None:
            assert event.step < self.next_step, f"step {event.step} was never taken; {self.next_step} is next"
            return []
        self._trained_s = now
        was_trained, record.trained, record.trained_before = record.trained, True, True
        return [] if was_trained else [GroupMoved(group_id, "taken", "trained") for group_id in record.group_ids]

    def _learner_restarted(self, event: ev.LearnerRestarted, _: float) -> list[BufferInstruction]:
        version, first, self._taken_s = event.version, min(self.steps, default=self.next_step), None
        assert first <= version <= self.next_step, f"the learner stands at version {version}, not at {first} to {self.next_step}"
        for step, record in self.steps.items():
            record.trained = step < version
            record.trained_before |= step < version
        return []

    def _steps_forgotten(self, event: ev.StepsForgotten, _: float) -> list[BufferInstruction]:
        for step in [step for step in self.steps if step < event.before_step]:
            assert self.steps[step].trained, f"step {step} is taken and not trained; it cannot be forgotten"
            self._num_forgotten_groups += len(self.steps.pop(step).group_ids)
        return []

    def _step_set_aside(self, event: ev.StepSetAside, _: float) -> list[BufferInstruction]:
        record = self.steps.get(event.step)
        assert record is not None, f"step {event.step} is not taken"
        assert not record.trained_before, f"step {event.step} was trained before; it is not set aside"
        del self.steps[event.step]
        later = [self.steps.pop(step) for step in range(event.step + 1, self.next_step)]
        for moved in later:
            moved.step -= 1
            self.steps[moved.step] = moved
        self.next_step -= 1
        self._taken_s = None
        gr.count_reason(self._dropped, event.reason, len(record.group_ids))
        return [GroupMoved(group_id, "taken", "dropped", event.reason) for group_id in record.group_ids]
