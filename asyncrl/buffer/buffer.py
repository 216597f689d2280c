"""The buffer as the controller sees it: decisions (state), the ledger, and payloads in memory, joined.

Invariants: whatever the state machine decides is in the same unit of the ledger as what caused it, and what comes together is one
unit; only once that is on disk is it acknowledged (`when_committed`) or a batch sent (`take`). Payloads are held of exactly the
live groups. A prompt waits here to be issued again exactly where the state says that it returns. Samples that are not what they
say are refused with a reason and never raise into the run.

Payloads of live groups are held until their step is taken, at most (eta + 1) x B groups by admission. Those of a taken step are
held until it is trained; a repeat after that reads them from the ledger again. The parameters that a step was packed with are
held as long as it may be repeated, so that a repeat is the very same batch.

Nothing here waits, except `write` of a ledger that falls behind.
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
from asyncrl.buffer.ledger.records import HeldGroup, OnCommitted, Record, Restored, StepParams
from asyncrl.buffer.ledger.store import Ledger
from asyncrl.buffer.state import BufferState
from asyncrl.buffer.validate import examine, group_error, largest_id, score_error, version_counts
from asyncrl.config.live import settings_of
from asyncrl.config.run import RunConfig
from asyncrl.errors import LedgerError
from asyncrl.observe.decisions import UNTRAINED, Watch
from asyncrl.schema.samples import Prompt, Sample, SampleFailure, Samples, Score, ScoredGroup, ScoredSample, Scores


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """What became of something that came in; of a repeat, nothing."""

    stored: tuple[int, ...] = ()
    """Members of the group that it changed."""
    refused: tuple[str, ...] = ()
    """Why others could not be taken, one a member; the member of an invalid sample has failed."""
    instructions: Sequence[BufferInstruction] = ()
    group_id: int = -1
    """With `submit_group`: the id the group was given."""


class TakenStep(msgspec.Struct, frozen=True):
    """One step's groups, by group id, to be packed with these very parameters."""

    step: int
    groups: tuple[ScoredGroup, ...]
    params: StepParams
    replay: bool
    staleness: StalenessFigures
    instructions: Sequence[BufferInstruction] = ()
    """Groups dropped on the way."""
    is_repeat: bool = False
    """It was taken before, trained or not."""


class Untrained(msgspec.Struct, frozen=True):
    """Samples of one group that no step trains, as `observe.record = "all"` keeps them."""

    group_id: int
    reason: str
    samples: tuple[Sample, ...]
    params: StepParams
    """That a step would have been packed with then."""


class Waiting(msgspec.Struct, frozen=True):
    """Why there is no step yet; ask again when a group became ready or failed."""

    reason: str
    instructions: Sequence[BufferInstruction] = ()


@dataclass(eq=False)
class Buffer:
    """State, ledger and payloads of one run.

    Example:
        >>> from asyncrl.buffer.group import BufferLimits
        >>> from asyncrl.buffer.ledger.store import MemoryLedger
        >>> buffer = Buffer(BufferState(BufferLimits(groups_per_step=1, max_staleness=0)), MemoryLedger())
        >>> buffer.issue(Prompt("p0"), "generator-0", version=0, group_size=4, now=0.0).pending
        (0, 1, 2, 3)
    """

    state: BufferState
    """The machine; already restored where the ledger holds something."""
    ledger: Ledger
    params: StepParams = StepParams(0, 0, 1.0)  # noqa: RUF009 - frozen
    """Recorded with each step; samples longer than its row budget are refused."""
    needs_reference: bool = False
    """Scores must bring reference log-probabilities: the reference is on inference workers."""
    restored: Restored = field(default_factory=Restored)
    """What the ledger held besides the state."""
    watch: Watch | None = None
    """Told of samples that no step trains, as of the events of a machine named `UNTRAINED`."""

    def __post_init__(self) -> None:
        restored = self.restored
        self.held, self._returned, self._step_params = restored.held, restored.returned, restored.step_params
        self._step_groups: dict[int, tuple[ScoredGroup, ...]] = {}
        """Of steps taken and not yet trained."""
        self.newest_version = restored.newest_version
        """No sample can hold a token of a later version."""
        self.cursor = restored.cursor
        """Where the prompt source stands."""
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
        """Enter a new group, after admission said so, and return it.

        Args:
            prompt: What is to be answered.
            generator: Who gets it.
            version: Live on that generator.
            group_size: Members.
            now: Clock seconds.
            cursor: Where the prompt source stands after this prompt; None: unchanged.
            replaces: Where `prompt` is that of `returned_prompt`, its group.

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
        """Note a generator's end; what it held is handed out again or, after too many losses, failed."""
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
        """Return a group that was dropped or failed and its prompt, which is to be issued next; stays until it is issued."""
        return next(iter(self._returned.items()), None)

    # -- samples and scores ----------------------------------------------------------------------------------------------

    def examine(self, samples: Samples) -> list[VersionCounts | str]:
        """Return the trained tokens of each sample by version, or why it is refused (validate.py)."""
        return examine(
            samples, newest_version=self.newest_version, max_tokens=self.params.tokens_per_row, vocab_size=self.vocab_size
        )

    def add_samples(self, arrived: Sequence[Samples], now: float) -> list[Receipt]:
        """Hold generated members and ask for their scores; return what became of those that came together.

        An invalid sample of a member that is still awaited fails that member, with the reason; the group goes on without it. But
        not where it is of an earlier attempt: the member is being generated again.
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
        """Enter rewards, or why there are none; return what became of those that came together."""
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
        """Enter that a member will never be trained; a repeat where it is being generated again since."""
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
        """Call back once all that was entered so far is on disk: acknowledge what brought it there, and nowhere else."""
        self.ledger.write((), callback)

    def submit_group(self, prompt: Prompt, samples: Sequence[Sample], submitter: str, now: float) -> Receipt:
        """Take in a whole group that outside code generated; it is checked and scored like any other.

        Group id and member indices in `samples` are replaced by new ones; the receipt names the group. It is refused, with
        nothing changed, where a sample is invalid or there is no place for a group as old as that.
        """
        size, screen, counts = len(samples), self.state.limits.screen, list[VersionCounts]()
        for sample in samples:
            checked = self.examine(Samples.of([sample]))[0]
            if isinstance(checked, str):
                return Receipt((), (f"invalid sample from {submitter}: {checked}",))
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
        """Refuse token ids from `size` on; return the held groups that have such, which are dropped."""
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
        """Follow a config that was changed while the run goes on, from the next step that is taken on.

        Args:
            config: The new one.
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
        """Take the groups of `step`, or say what it waits for.

        Args:
            step: The next one, or one of `learner_restarted`'s, which gives the very same groups again.
            now: Clock seconds.
            on_committed: Send the batch to the learner only from here: a step that is trained must be in the books.
            group_ids: Exactly these, ascending; empty: as the policy chooses.

        Raises:
            LedgerError: A step to be repeated has lost its payloads.
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
            return TakenStep(step, groups, params, decision.replay, decision.staleness, dropped)
        if records:
            self.ledger.write(records)
        assert isinstance(decision, ev.Wait)
        return Waiting(decision.reason, dropped)

    def _repeated(self, decision: ev.TakeGroups) -> TakenStep:
        """Return a step as it was taken the first time."""
        step, params = decision.step, self._step_params[decision.step]
        groups = self._step_groups.get(step)
        if groups is None:
            groups = self._step_groups[step] = tuple(self.ledger.load_groups(decision.group_ids))
        counts = []
        for group in groups:
            trained = trained_members(members_of(group), params.screen)
            counts += [version_counts(scored.sample) for scored in group.members if scored.sample.index in trained]
        figures = staleness_figures(step, counts, mask_below=decision.mask_below)
        return TakenStep(step, groups, params, decision.replay, figures, is_repeat=True)

    def mark_trained(self, step: int, now: float) -> Sequence[BufferInstruction]:
        """Note that the optimizer step is done; harmless when repeated."""
        instructions = self.state.handle(ev.StepTrained(step), now)
        self._step_groups.pop(step, None)
        if group_ids := tuple(moved.group_id for moved in instructions if isinstance(moved, GroupMoved)):
            self.ledger.write((rec.TrainedRecord(step, group_ids, now),))
        return instructions

    def learner_restarted(self, version: int, now: float) -> tuple[int, ...]:
        """Note that the learner stands at `version` (at the start, after a resume, after its death).

        Returns:
            The steps to take again, in order, before any new one; empty at a fresh start.

        Raises:
            LedgerError: The checkpoint and the ledger do not belong together, or steps to repeat lack the reference's
                log-probabilities, which this run does not ask of the learner.
        """
        first, last = min(self.state.steps, default=self.state.next_step), self.state.next_step
        if not first <= version <= last:
            raise LedgerError(
                f"the learner stands at version {version}, but the ledger repeats steps from {first} on and {last} were taken: "
                "the checkpoint is not of this run, or older than the oldest one kept"
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
        """Drop a live group on somebody's decision; the reason goes into the books."""
        records: list[Record] = []
        instructions = self._handle(ev.GroupDropped(group_id, reason), records, now)
        self.ledger.write(records)
        return instructions

    def set_aside(self, step: int, reason: str, now: float) -> tuple[ScoredGroup, ...]:
        """Drop the groups of a step that is taken and was never trained, and move later steps up by one; return the groups.

        For a batch that ends the learner whenever it is tried.
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
        """Let go of payloads of steps before this one, all trained: no learner may go back to before it any more."""
        self.state.handle(ev.StepsForgotten(before_step), now)
        self._step_params = {step: params for step, params in self._step_params.items() if step >= before_step}
        # One group is left where all have ended: the next resume reads the prompt source's place there.
        in_use = [*self.state.groups, *self.state.returned, max(self.state.next_group_id - 1, 0)]
        in_use += [group_id for record in self.state.steps.values() for group_id in record.group_ids]
        self.ledger.write((rec.ForgetRecord(before_step, min(in_use)),))

    # -- the ledger ------------------------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        """Return the groups per state."""
        return self.state.counts()

    def check(self) -> None:
        """Compare state, payloads and ledger; waits for the ledger to catch up.

        Raises:
            AssertionError: They do not say the same: something was lost or counted twice.
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
        """Fail a member, and add what the ledger is told of it to `records`."""
        records.append(rec.FailureRecord(failure.group_id, failure.index, failure.attempt, failure.stage, failure.reason, now))
        event = ev.SampleFailed(failure.group_id, failure.index, failure.kind or failure.reason)
        instructions = self._handle(event, records, now)
        if (held := self.held.get(failure.group_id)) and (sample := held.samples.pop(failure.index, None)):
            self._note_untrained(failure.group_id, failure.kind or failure.reason, [sample], now)
        return instructions

    def _handle(self, event: ev.BufferEvent, records: list[Record], now: float) -> list[BufferInstruction]:
        """Have the state decide; add the moves that follow to `records`, and let go of what belongs to ended groups."""
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
    """Return why these members are refused, of which there are none; of others a repeat changes nothing."""
    if "unknown" not in standing:
        return ()
    return tuple(f"there is no member g{group_id}.{i}" for i, state in zip(indices, standing, strict=True) if state == "unknown")
