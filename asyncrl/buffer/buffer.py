"""The buffer as the controller uses it: it joins the state machine (decisions), the ledger (on disk) and the samples in memory.

Invariants: an event and the decisions that follow from it are written in one ledger transaction, and messages that arrive
together share one; a message is acknowledged (`when_committed`) and a batch is sent (`take`) only after the commit. Samples are
held in memory for exactly the live groups. A prompt waits here to be issued again exactly where the state says that it returns.
An invalid sample is refused with a reason and never raises an error in the run.

Samples of live groups are held until their step is taken: at most (eta + 1) x B groups, by admission. Samples of a taken step
are held until it is trained; a repeat after that reads them from the ledger. The parameters that a step was packed with are held
as long as the step may be repeated, so that a repeat is exactly the same batch.

Nothing here waits, except `write` when the ledger falls behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

import asyncrl.buffer.ledger.records as rec
from asyncrl.algorithms.screening import members_of, trained_members
from asyncrl.buffer import events as ev
from asyncrl.buffer.events import BufferInstruction, GroupMoved, StalenessFigures, VersionCounts
from asyncrl.buffer.group import Counts, Group, staleness_figures
from asyncrl.buffer.ledger.records import OnCommitted, Record, StepParams
from asyncrl.buffer.ledger.store import Ledger
from asyncrl.buffer.state import BufferState
from asyncrl.buffer.validate import examine, group_error, largest_id, score_error, version_counts
from asyncrl.config.live import settings_of
from asyncrl.config.run import RunConfig
from asyncrl.errors import LedgerError
from asyncrl.observe.decisions import UNTRAINED
from asyncrl.observe.machine import Watch
from asyncrl.schema.samples import Prompt, Sample, SampleFailure, Samples, Score, ScoredGroup, ScoredSample, Scores


@dataclass(slots=True)
class HeldGroup:
    """Payloads of a live group: its generated members, some of them scored."""

    prompt: Prompt
    samples: dict[int, Sample] = field(default_factory=dict)
    scored: dict[int, ScoredSample] = field(default_factory=dict)

    def as_scored(self, group_id: int) -> ScoredGroup:
        """Return the group for training, without failed members."""
        return ScoredGroup(group_id, self.prompt, tuple(self.scored[index] for index in sorted(self.scored)))

    def prompt_ids(self) -> tuple[bytes, str]:
        """Return the token ids of the prompt, if known, and the generator that they are from (empty: the task)."""
        if self.prompt.token_ids or not self.samples:
            return self.prompt.token_ids, ""
        first = next(iter(self.samples.values()))
        return first.prompt_ids, first.generator


@dataclass(slots=True)
class Restored:
    """The content of a ledger besides the state."""

    held: dict[int, HeldGroup] = field(default_factory=dict)
    returned: dict[int, Prompt] = field(default_factory=dict)
    """Prompts to issue again, by the id of the dropped or failed group."""
    step_params: dict[int, StepParams] = field(default_factory=dict)
    """Parameters of steps that may be repeated."""
    steps_without_reference: frozenset[int] = frozenset()
    """Taken steps whose scores have no reference log-probabilities."""
    newest_version: int = 0
    cursor: int = 0

    def why_not_repeated(self, to_repeat: Sequence[int]) -> str:
        """Return why a run whose reference is on inference workers cannot repeat these steps; empty if it can."""
        steps = [step for step in to_repeat if step in self.steps_without_reference]
        if not steps:
            return ""
        return (
            f"steps {steps[0]} to {steps[-1]} were taken and are to be trained (again), and their samples were scored without "
            "reference log-probabilities: algorithm.reference.where = 'worker' (or a reference that was not there before) can be "
            "set once they are trained and a checkpoint is written; resume with the settings as they were until then"
        )


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The result of entering samples, scores or a failure; for a repeat all fields are empty."""

    stored: tuple[int, ...] = ()
    """Members of the group that were changed."""
    refused: tuple[str, ...] = ()
    """Why other members were refused, one reason for each; the member of an invalid sample has failed."""
    instructions: Sequence[BufferInstruction] = ()
    group_id: int = -1
    """With `submit_group`: the id the group was given."""


class TakenStep(msgspec.Struct, frozen=True):
    """One step's groups, ordered by group id, and the parameters to pack them with."""

    step: int
    groups: tuple[ScoredGroup, ...]
    params: StepParams
    staleness: StalenessFigures
    instructions: Sequence[BufferInstruction] = ()
    """Groups that were dropped while choosing this step's groups."""
    is_repeat: bool = False
    """Whether the step was taken before, trained or not."""


class Untrained(msgspec.Struct, frozen=True):
    """Samples of one group that no step trains, as `observe.record = "all"` keeps them."""

    group_id: int
    reason: str
    samples: tuple[Sample, ...]
    params: StepParams
    """What a step would have been packed with at that time."""


class Waiting(msgspec.Struct, frozen=True):
    """Why there is no step yet; call `take` again after a group became ready or failed."""

    reason: str
    instructions: Sequence[BufferInstruction] = ()


@dataclass(eq=False)
class Buffer:
    """State, ledger and samples in memory of one run.

    Example:
        >>> from asyncrl.buffer.group import BufferLimits
        >>> from asyncrl.buffer.ledger.store import MemoryLedger
        >>> buffer = Buffer(BufferState(BufferLimits(groups_per_step=1, max_staleness=0)), MemoryLedger())
        >>> buffer.issue(Prompt("p0"), "generator-0", version=0, group_size=4, now=0.0).pending
        (0, 1, 2, 3)
    """

    state: BufferState
    """The state machine; already restored if the ledger has records."""
    ledger: Ledger
    params: StepParams = StepParams(0, 0, 1.0)  # noqa: RUF009 - frozen
    """Recorded with each step; samples longer than `tokens_per_row` are refused."""
    needs_reference: bool = False
    """Whether scores must include reference log-probabilities: the reference model is on inference workers."""
    restored: Restored = field(default_factory=Restored)
    """What the ledger held besides the state."""
    watch: Watch | None = None
    """Called with samples that no step trains, as events of a machine named `UNTRAINED`."""

    def __post_init__(self) -> None:
        restored = self.restored
        self.held, self._returned, self._step_params = restored.held, restored.returned, restored.step_params
        self._step_groups: dict[int, tuple[ScoredGroup, ...]] = {}
        """Of steps taken and not yet trained."""
        self.newest_version = restored.newest_version
        """No sample can hold a token of a later version."""
        self.cursor = restored.cursor
        """Position of the prompt source."""
        self.vocab_size = 0
        """Token ids from here on are refused; 0: not known yet."""

    # -- generation ------------------------------------------------------------------------------------------------------

    def issue(
        self,
        prompt: Prompt,
        generator: str,
        *,
        version: int,
        group_size: int,
        now: float,
        cursor: int | None = None,
        replaces: int | None = None,
    ) -> Group:
        """Enter a new group that admission allowed, and return it.

        Args:
            prompt: The prompt to answer.
            generator: Name of the generator that gets the group.
            version: The version live on that generator.
            group_size: Number of members.
            now: Clock seconds.
            cursor: Position of the prompt source after this prompt; None: unchanged.
            replaces: If `prompt` came from `returned_prompt`, the id of the group that it belonged to.

        Raises:
            AssertionError: There is no place for a group of that version; admission is broken.
        """
        assert self.state.has_place(version), f"no place for a group of version {version}: {self.counts()}"
        self.cursor = self.cursor if cursor is None else cursor
        self.newest_version = max(self.newest_version, version)
        retries = self.state.returned.get(replaces, 0) if replaces is not None else 0
        group_id = self.state.next_group_id
        self.state.handle(ev.GroupIssued(group_id, prompt.prompt_id, group_size, generator, version, replaces), now)
        if replaces is not None:
            self._returned.pop(replaces, None)
        self.held[group_id] = HeldGroup(prompt)
        record = rec.IssuedRecord(group_id, prompt, generator, version, group_size, now, retries, replaces, self.cursor)
        self.ledger.write((record,))
        return self.state.groups[group_id]

    def reissue(self, group_id: int, generator: str, version: int, now: float) -> Group:
        """Hand the missing members of a group out again, and return it."""
        self.state.handle(ev.GroupPlaced(group_id, generator, version), now)
        group = self.state.groups[group_id]
        self.ledger.write((rec.PlacedRecord(group_id, generator, version, group.attempt, now),))
        return group

    def generator_lost(self, name: str, now: float) -> Sequence[BufferInstruction]:
        """Note that a generator has ended; its groups are handed out again or, after too many losses, failed."""
        running = [group for group in self.state.groups.values() if group.state == "running" and group.generator == name]
        held = [(group, group.attempt, group.pending) for group in running]
        reason, records = f"generator {name} died once too often", list[Record]()
        instructions = self._handle(ev.GeneratorGone(name), records, now)
        for group, attempt, lost in held:
            if not group.pending:
                records += [rec.FailureRecord(group.group_id, index, attempt, "generate", reason, now) for index in lost]
        if records:
            self.ledger.write(records)
        return instructions

    def version_published(self, version: int) -> None:
        """Note that samples may hold tokens of this version from now on."""
        self.newest_version = max(self.newest_version, version)

    def returned_prompt(self) -> tuple[int, Prompt] | None:
        """Return the id of a dropped or failed group, and its prompt, which must be issued next; the same until it is issued."""
        return next(iter(self._returned.items()), None)

    # -- samples and scores ----------------------------------------------------------------------------------------------

    def examine(self, samples: Samples) -> list[VersionCounts | str]:
        """Return, for each sample, its trained tokens by version, or why it is refused (validate.py)."""
        return examine(
            samples, newest_version=self.newest_version, max_tokens=self.params.tokens_per_row, vocab_size=self.vocab_size
        )

    def add_samples(self, arrived: Sequence[Samples], now: float) -> list[Receipt]:
        """Enter generated members and ask for their scores; return one receipt for each message.

        An invalid sample fails its member with the reason, if the member is still awaited; the group continues without it. A
        sample of an earlier attempt fails nothing, because the member is being generated again.
        """
        receipts, records = [], list[Record]()
        for samples in arrived:
            group_id, group = samples.group_id, self.state.groups.get(samples.group_id)
            standing = [self.state.member_state(group_id, index) for index in samples.indices]
            refused = _unknown(group_id, samples.indices, standing)
            instructions = list[BufferInstruction]()
            if group is None or "pending" not in standing:
                receipts.append(Receipt((), refused))
                continue
            valid: dict[int, VersionCounts] = {}
            for index, state, counts in zip(samples.indices, standing, self.examine(samples), strict=True):
                if state != "pending":
                    continue
                if not isinstance(counts, str):
                    valid[index] = counts
                    continue
                reason = f"invalid sample from {samples.generator}: {counts}"
                refused += (reason,)
                if samples.attempt >= group.attempt:
                    instructions += self._fail(SampleFailure(group_id, index, samples.attempt, "generate", reason), now, records)
            if valid and group_id in self.held:
                if len(valid) < len(samples.indices):
                    samples = Samples.of([sample for sample in samples.members() if sample.index in valid])
                self.held[group_id].samples.update((sample.index, sample) for sample in samples.members())
                records.append(rec.SamplesRecord(samples, tuple(valid.values()), now))
                cut_off = tuple([i for i, why in zip(samples.indices, samples.finish_reasons, strict=True) if why == "length"])
                event = ev.SamplesFinished(group_id, samples.indices, tuple(valid.values()), cut_off)
                instructions += self._handle(event, records, now)
            receipts.append(Receipt(tuple(valid), refused, instructions))
        if records:
            self.ledger.write(records)
        return receipts

    def add_scores(self, arrived: Sequence[Scores], now: float) -> list[Receipt]:
        """Enter rewards, or the reasons why there are none; return one receipt for each message."""
        receipts, records = [], list[Record]()
        for scores in arrived:
            group_id, instructions, valid = scores.group_id, list[BufferInstruction](), list[Score]()
            indices = [score.index for score in scores.scores]
            standing = [self.state.member_state(group_id, index) for index in indices]
            held = self.held.get(group_id)
            for score, state in zip(scores.scores, standing, strict=True):
                if state != "generated" or held is None:
                    continue
                sample = held.samples[score.index]
                if error := score_error(score, sample.num_tokens, needs_reference=self.needs_reference):
                    kind = score.error_kind if score.error else ""
                    failure = SampleFailure(group_id, score.index, scores.attempt, "reward", error, kind=kind)
                    instructions += self._fail(failure, now, records)
                else:
                    held.scored[score.index] = ScoredSample(sample, score.reward, score.parts, score.reference_logprobs)
                    valid.append(score)
            if valid:
                if len(valid) < len(indices):
                    scores = msgspec.structs.replace(scores, scores=tuple(valid))
                records.append(rec.ScoresRecord(scores, now))
                rewards = tuple([score.reward for score in valid])
                event = ev.SamplesScored(group_id, tuple([score.index for score in valid]), rewards)
                instructions += self._handle(event, records, now)
            settled = tuple([index for index, state in zip(indices, standing, strict=True) if state == "generated"])
            receipts.append(Receipt(settled, _unknown(group_id, indices, standing), instructions))
        if records:
            self.ledger.write(records)
        return receipts

    def add_failure(self, failure: SampleFailure, now: float) -> Receipt:
        """Enter a member's failure: it will never be trained. Ignored where the member is being generated again meanwhile."""
        standing = self.state.member_state(failure.group_id, failure.index)
        if standing == "pending" and failure.attempt < self.state.groups[failure.group_id].attempt:
            standing = "over"
        if standing not in {"pending", "generated"}:
            return Receipt((), _unknown(failure.group_id, [failure.index], [standing]))
        records: list[Record] = []
        instructions = self._fail(failure, now, records)
        self.ledger.write(records)
        return Receipt((failure.index,), (), instructions)

    def when_committed(self, callback: OnCommitted) -> None:
        """Call `callback` once everything entered so far is on disk. Acknowledge messages only from there."""
        self.ledger.write((), callback)

    def submit_group(self, prompt: Prompt, samples: Sequence[Sample], submitter: str, now: float) -> Receipt:
        """Enter a complete group that outside code generated; it is checked and scored like any other.

        Group id and member indices in `samples` are replaced by new ones; the receipt has the group's id. The group is refused,
        with nothing changed, where a sample is invalid or there is no place for a group of that age.
        """
        size, screen, counts = len(samples), self.state.limits.screen, list[VersionCounts]()
        for number, sample in enumerate(samples):
            checked = self.examine(Samples.of([sample]))[0]
            if isinstance(checked, str):
                return Receipt((), (f"sample {number} of the group is invalid: {checked}",))
            counts.append(checked)
        if reason := group_error(samples, screen, self.params.tokens_per_row):
            return Receipt((), (reason,))
        oldest = min(each[0][0] for each in counts)
        if not self.state.has_place(oldest):
            reason = f"no place for a group with tokens of version {oldest} now; try again after the next step"
            return Receipt((), (reason,))
        group_id = self.state.next_group_id
        truncated = tuple(index for index, sample in enumerate(samples) if sample.finish_reason == "length")
        whole = msgspec.structs.replace(
            Samples.of(samples), group_id=group_id, attempt=0, indices=tuple(range(size)), generator=submitter, purpose="train"
        )
        self.held[group_id] = HeldGroup(prompt, {sample.index: sample for sample in whole.members()})
        issued = rec.IssuedRecord(group_id, prompt, submitter, oldest, size, now, cursor=self.cursor, external=True)
        records: list[Record] = [issued, rec.SamplesRecord(whole, tuple(counts), now)]
        self.state.handle(ev.GroupIssued(group_id, prompt.prompt_id, size, submitter, oldest, external=True), now)
        instructions = self._handle(ev.SamplesFinished(group_id, whole.indices, tuple(counts), truncated), records, now)
        self.ledger.write(records)
        return Receipt(whole.indices, (), instructions, group_id)

    def know_vocabulary(self, size: int, now: float) -> list[int]:
        """Refuse token ids from `size` on from now on; drop the held groups that have such ids, and return their group ids."""
        self.vocab_size = size
        wrong = [
            group_id
            for group_id, held in self.held.items()
            if any(largest_id(sample.prompt_ids + sample.token_ids) >= size for sample in held.samples.values())
        ]
        for group_id in wrong:
            self.drop_group(group_id, "token ids beyond the vocabulary", now)
        return wrong

    def change(self, config: RunConfig, what: str, now: float) -> None:
        """Apply a config that was changed during the run; it applies from the next step taken.

        Args:
            config: The new config.
            what: Who changed what, for the ledger.
            now: Clock seconds.
        """
        most_groups = config.num_steps * config.algorithm.groups_per_step
        self.state.handle(ev.BoundsChanged(config.buffer.max_staleness, most_groups), now)
        self.params = msgspec.structs.replace(
            self.params, temperature=config.generate.sampling.temperature, settings=settings_of(config)
        )
        self.ledger.write((rec.ChangedRecord(self.state.next_step, what, now),))

    # -- steps -----------------------------------------------------------------------------------------------------------

    def take(
        self, step: int, now: float, on_committed: OnCommitted | None = None, group_ids: tuple[int, ...] = ()
    ) -> TakenStep | Waiting:
        """Take the groups of `step`, or return what the step waits for.

        Args:
            step: The next step, or one that `learner_restarted` returned, which gives exactly the same groups again.
            now: Clock seconds.
            on_committed: Called after the commit. Send the batch to the learner only from here: a trained step must be in the
                ledger.
            group_ids: Take exactly these, in ascending order; empty: the policy chooses.

        Raises:
            LedgerError: The samples of a step to repeat are missing in the ledger.
        """
        records: list[Record] = []
        *dropped, decision = self._handle(ev.TakeStep(step, group_ids), records, now)
        if isinstance(decision, ev.TakeGroups):
            if decision.repeat:
                taken = self._repeated(decision)
                self.ledger.write((), on_committed)
                return taken
            assert decision.staleness is not None, "a repeat is no first take"
            groups = tuple(self.held.pop(group_id).as_scored(group_id) for group_id in decision.group_ids)
            params = msgspec.structs.replace(self.params, mask_below=decision.mask_below)
            self._step_groups[step], self._step_params[step] = groups, params
            records.append(rec.TakenRecord(step, decision.group_ids, params, decision.staleness.token_max, now))
            self.ledger.write(records, on_committed)
            return TakenStep(step, groups, params, decision.staleness, dropped)
        if records:
            self.ledger.write(records)
        assert isinstance(decision, ev.Wait)
        return Waiting(decision.reason, dropped)

    def _repeated(self, decision: ev.TakeGroups) -> TakenStep:
        """Return a step exactly as it was taken the first time."""
        step, params = decision.step, self._step_params[decision.step]
        groups = self._step_groups.get(step)
        if groups is None:
            groups = self._step_groups[step] = tuple(self.ledger.load_groups(decision.group_ids))
        counts = []
        for group in groups:
            trained = trained_members(members_of(group), params.screen)
            counts += [version_counts(scored.sample) for scored in group.members if scored.sample.index in trained]
        figures = staleness_figures(step, counts, mask_below=decision.mask_below)
        return TakenStep(step, groups, params, figures, is_repeat=True)

    def mark_trained(self, step: int, now: float) -> Sequence[BufferInstruction]:
        """Note that the optimizer step is done; repeating the call is harmless."""
        instructions = self.state.handle(ev.StepTrained(step), now)
        self._step_groups.pop(step, None)
        if group_ids := tuple(moved.group_id for moved in instructions if isinstance(moved, GroupMoved)):
            self.ledger.write((rec.TrainedRecord(step, group_ids, now),))
        return instructions

    def learner_restarted(self, version: int, now: float) -> tuple[int, ...]:
        """Note that the learner starts from `version` (at the run's start, after a resume, or after its death).

        Returns:
            The steps to take again, in order, before any new step; empty at a fresh start.

        Raises:
            LedgerError: The checkpoint and the ledger do not belong together, or the steps to repeat lack the reference's
                log-probabilities, which the learner does not compute in this run.
        """
        first, last = min(self.state.steps, default=self.state.next_step), self.state.next_step
        if not first <= version <= last:
            raise LedgerError(
                f"the learner stands at version {version}, but the ledger repeats steps from {first} on and {last} were taken: "
                "the checkpoint is from another run, or older than the oldest one kept; resume with this run's own checkpoints"
            )
        self.state.handle(ev.LearnerRestarted(version), now)
        if last:
            self.ledger.write((rec.RestartedRecord(version, now),))
        self.newest_version = max(self.newest_version, version)
        to_repeat = self.state.steps_to_repeat()
        if self.needs_reference and (reason := self.restored.why_not_repeated(to_repeat)):
            raise LedgerError(reason)
        return to_repeat

    def drop_group(self, group_id: int, reason: str, now: float) -> Sequence[BufferInstruction]:
        """Drop a live group because a caller decided so; the reason goes into the ledger."""
        records: list[Record] = []
        instructions = self._handle(ev.GroupDropped(group_id, reason), records, now)
        self.ledger.write(records)
        return instructions

    def set_aside(self, step: int, reason: str, now: float) -> tuple[ScoredGroup, ...]:
        """Drop and return the groups of a step that is taken but was never trained; the step numbers of later steps drop by one.

        For a batch on which the learner dies every time.
        """
        group_ids = self.state.steps[step].group_ids
        groups = self._step_groups.pop(step, ()) or tuple(self.ledger.load_groups(group_ids))
        params = self._step_params.pop(step)
        for later in sorted(key for key in self._step_params if key > step):
            self._step_params[later - 1] = self._step_params.pop(later)
            if later in self._step_groups:
                self._step_groups[later - 1] = self._step_groups.pop(later)
        self.state.handle(ev.StepSetAside(step, reason), now)
        self.ledger.write((rec.SetAsideRecord(step, group_ids, reason, now),))
        for group in groups:
            self._note_untrained(group.group_id, reason, [member.sample for member in group.members], now, params)
        return groups

    def forget(self, before_step: int, now: float) -> None:
        """Delete the samples of all steps before this one, which are all trained; no learner can go back before it any more."""
        self.state.handle(ev.StepsForgotten(before_step), now)
        self._step_params = {step: params for step, params in self._step_params.items() if step >= before_step}
        # One group is kept even if all have ended: the next resume reads the prompt source's position from it.
        in_use = [*self.state.groups, *self.state.returned, max(self.state.next_group_id - 1, 0)]
        in_use += [group_id for record in self.state.steps.values() for group_id in record.group_ids]
        self.ledger.write((rec.ForgetRecord(before_step, min(in_use)),))

    # -- the ledger ------------------------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        """Return the number of groups in each state."""
        return self.state.counts()

    def check(self) -> None:
        """Compare state, samples in memory and ledger; waits until the ledger has written everything.

        Raises:
            AssertionError: They differ: something was lost or counted twice.
        """
        self.state.check_invariants()
        assert self.held.keys() == self.state.groups.keys(), "payloads are held of other groups than the live ones"
        self.ledger.sync()
        expected, on_disk = msgspec.to_builtins(self.counts()), self.ledger.state_counts()
        del expected["issued"]
        expected |= {ended: sum(expected[ended].values()) for ended in ("dropped", "failed")}
        assert on_disk is None or Counter(on_disk) == Counter(expected), f"ledger has {on_disk}, state {expected}"

    def close(self) -> None:
        """Commit everything and release the ledger."""
        self.ledger.close()

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _fail(self, failure: SampleFailure, now: float, records: list[Record]) -> list[BufferInstruction]:
        """Fail a member, and add its ledger records to `records`."""
        records.append(rec.FailureRecord(failure.group_id, failure.index, failure.attempt, failure.stage, failure.reason, now))
        event = ev.SampleFailed(failure.group_id, failure.index, failure.kind or failure.reason)
        instructions = self._handle(event, records, now)
        if (held := self.held.get(failure.group_id)) and (sample := held.samples.pop(failure.index, None)):
            self._note_untrained(failure.group_id, failure.kind or failure.reason, [sample], now)
        return instructions

    def _handle(self, event: ev.BufferEvent, records: list[Record], now: float) -> list[BufferInstruction]:
        """Let the state machine decide; add the resulting moves to `records`, and release the samples of ended groups."""
        instructions = self.state.handle(event, now)
        for moved in instructions:
            if type(moved) is GroupMoved:
                returns = -1
                if moved.after in {"dropped", "failed"}:
                    held = self.held.pop(moved.group_id)
                    self._note_untrained(moved.group_id, moved.reason, held.samples.values(), now)
                    returns = self.state.returned.get(moved.group_id, -1)
                    if returns >= 0:
                        self._returned[moved.group_id] = held.prompt
                records.append(rec.MovedRecord(moved.group_id, moved.after, moved.reason, now, returns))
        return instructions

    def _note_untrained(
        self, group_id: int, reason: str, samples: Collection[Sample], now: float, params: StepParams | None = None
    ) -> None:
        if samples and self.watch is not None:
            self.watch(UNTRAINED, Untrained(group_id, reason, tuple(samples), params or self.params), now, ())


def _unknown(group_id: int, indices: Sequence[int], standing: Sequence[str]) -> tuple[str, ...]:
    """Return a reason for each member that does not exist; for the others nothing, since a repeat changes nothing."""
    if "unknown" not in standing:
        return ()
    return tuple(f"there is no member g{group_id}.{i}" for i, state in zip(indices, standing, strict=True) if state == "unknown")
