"""The buffer as the controller sees it: decisions (state), books (ledger) and payloads in memory, joined.

Invariants: whatever the state machine decides is in the same unit of the ledger as what caused it; `on_committed` runs once that
unit is on disk, on the event loop, and only then is a message acknowledged or a batch sent. At most (eta + 1) x B groups of
payloads are in memory, besides those of steps taken and not yet trained. Samples that are not what they say are refused with a
reason and never raise into the run.

Nothing here waits, except `write` of a ledger that falls behind. Called by the controller (control/), the transport bench and
plan/simulate.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.buffer.events import (
    BufferInstruction,
    GeneratorGone,
    GroupDropped,
    GroupIssued,
    GroupMoved,
    GroupPlaced,
    LearnerRestarted,
    NotEnough,
    Reissue,
    SampleFailed,
    SampleFinished,
    SampleScored,
    StepsForgotten,
    StepTrained,
    TakeGroups,
    TakeStep,
    Wait,
)
from asyncrl.buffer.external import examine_group
from asyncrl.buffer.moves import Moves
from asyncrl.buffer.payloads import Payloads
from asyncrl.buffer.records import (
    FailureRecord,
    ForgetRecord,
    IssuedRecord,
    Ledger,
    OnCommitted,
    PlacedRecord,
    Record,
    RestartedRecord,
    SampleRecord,
    ScoreRecord,
    StepParams,
    TakenRecord,
    TrainedRecord,
)
from asyncrl.buffer.replies import Receipt, ReturnedPrompt, TakenStep, Waiting, WorkOrder, not_wanted
from asyncrl.buffer.restore import Restored
from asyncrl.buffer.state import BufferState, Counts
from asyncrl.buffer.step_payloads import StepPayloads
from asyncrl.buffer.validate import SampleRefusedError, examine, score_error
from asyncrl.errors import LedgerError
from asyncrl.schema.samples import Prompt, Sample, SampleFailure, Score, ScoreRequest

__all__ = ["Buffer", "Counts", "Receipt", "ReturnedPrompt", "TakenStep", "Waiting", "WorkOrder"]


class Buffer:
    """State, ledger and payloads of one run.

    Args:
        state: The machine; already restored where the ledger holds something.
        ledger: The books.
        tokens_per_row: Row budget recorded with each step; longer samples are refused.
        temperature: Recorded with each step.
        needs_reference: Scores must bring reference log-probabilities: the reference is on inference workers.
        minibatches: Recorded with each step: updates whose groups share no row.
        restored: What the ledger held besides the state.

    Example:
        >>> from asyncrl.schema.samples import Prompt
        >>> buffer = Buffer(BufferState(BufferLimits(groups_per_step=1, max_staleness=0)), MemoryLedger())
        >>> buffer.issue(Prompt("p0"), "generator-0", version=0, group_size=4, now=0.0).indices
        (0, 1, 2, 3)
    """

    def __init__(
        self,
        state: BufferState,
        ledger: Ledger,
        *,
        tokens_per_row: int = 0,
        temperature: float = 1.0,
        needs_reference: bool = False,
        minibatches: int = 1,
        restored: Restored | None = None,
    ) -> None:
        self.state = state
        self.ledger = ledger
        self._tokens_per_row = tokens_per_row
        self._needs_reference = needs_reference
        restored = restored or Restored()
        self._payloads = Payloads(restored.held)
        self._moves = Moves(state, self._payloads, restored.returned)
        self._steps = StepPayloads(
            StepParams(0, tokens_per_row, temperature, state.limits.screen, minibatches),
            restored.step_params,
            restored.steps_without_reference,
            needs_reference=needs_reference,
        )
        self.newest_version = restored.newest_version
        """No sample can hold a token of a later version."""
        self.cursor = restored.cursor
        """Where the prompt source stands."""

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
    ) -> WorkOrder:
        """Enter a new group, after admission said so.

        Args:
            prompt: What is to be answered.
            generator: Who gets it.
            version: Live on that generator.
            group_size: Members.
            now: Clock seconds.
            cursor: Where the prompt source stands after this prompt; None: unchanged.
            replaces: Where `prompt` is that of `returned_prompt()`, its group.

        Raises:
            AssertionError: There is no place for a group of that version; admission is broken.
        """
        assert self.state.has_place(version), f"no place for a group of version {version}: {self.counts()}"
        self.cursor = self.cursor if cursor is None else cursor
        self.newest_version = max(self.newest_version, version)
        retries = self.state.returned.get(replaces, 0) if replaces is not None else 0
        group_id = self.state.next_group_id
        self.state.handle(GroupIssued(group_id, prompt.prompt_id, group_size, generator, version, replaces), now)
        if replaces is not None:
            self._moves.returned.pop(replaces, None)
        self._payloads.open(group_id, prompt)
        record = IssuedRecord(group_id, prompt, generator, version, group_size, now, retries, replaces, self.cursor)
        self.ledger.write((record,))
        return WorkOrder(group_id, 0, prompt, tuple(range(group_size)))

    def reissue(self, group_id: int, generator: str, version: int, now: float) -> WorkOrder | None:
        """Hand the missing members of a group out again; None where none is missing any more."""
        group = self.state.groups.get(group_id)
        if group is None or group.state != "running":
            return None
        self.state.handle(GroupPlaced(group_id, generator, version), now)
        self.ledger.write((PlacedRecord(group_id, generator, version, group.attempt, now),))
        return WorkOrder(group_id, group.attempt, self._payloads.groups[group_id].prompt, group.pending)

    def generator_lost(self, name: str, now: float) -> Sequence[BufferInstruction]:
        """Note a generator's death; `Reissue` for what to hand out again, `GroupMoved` for what could not be saved."""
        lost = [group for group in self.state.groups.values() if group.state == "running" and group.generator == name]
        failing = {group.group_id: (group.pending, group.attempt) for group in lost}
        instructions = self.state.handle(GeneratorGone(name), now)
        saved = {instruction.group_id for instruction in instructions if isinstance(instruction, Reissue)}
        reason = f"generator {name} died once too often"
        failures: list[Record] = [
            FailureRecord(group_id, index, attempt, "generate", reason, now)
            for group_id, (indices, attempt) in failing.items()
            if group_id not in saved
            for index in indices
        ]
        self._write(failures, instructions, now)
        return instructions

    def version_published(self, version: int) -> None:
        """Note that samples may hold tokens of this version from now on."""
        self.newest_version = max(self.newest_version, version)

    def returned_prompt(self) -> ReturnedPrompt | None:
        """Return the prompt that should be issued next because its group was dropped or failed; stays until it is issued."""
        for group_id, prompt in self._moves.returned.items():
            return ReturnedPrompt(prompt, group_id)
        return None

    def unplaced(self) -> list[Reissue]:
        """Return what is with no generator and must be handed out again (after a resume), oldest first."""
        return self.state.unplaced()

    # -- samples and scores ----------------------------------------------------------------------------------------------

    def add_sample(self, sample: Sample, now: float, on_committed: OnCommitted | None = None) -> Receipt:
        """Hold a generated member and ask for its score.

        An invalid sample of a member that is still awaited fails that member, with the reason; the group goes on without it. But
        not where it is of an earlier attempt: the member is being generated again.
        """
        standing = self.state.member_state(sample.group_id, sample.index)
        if standing != "pending":
            return self._not_wanted(sample.group_id, sample.index, standing, on_committed)
        try:
            counts = examine(sample, newest_version=self.newest_version, max_tokens=self._tokens_per_row)
        except SampleRefusedError as error:
            reason = f"invalid sample from {sample.generator}: {error}"
            if sample.attempt < self.state.groups[sample.group_id].attempt:
                self.ledger.write((), on_committed)
                return Receipt("refused", reason)
            failure = SampleFailure(sample.group_id, sample.index, sample.attempt, "generate", reason)
            instructions = self._fail(failure, now, on_committed)
            return Receipt("refused", reason, instructions)
        truncated = sample.finish_reason == "length"
        instructions = self.state.handle(SampleFinished(sample.group_id, sample.index, counts, truncated), now)
        self._payloads.groups[sample.group_id].samples[sample.index] = sample
        self._write([SampleRecord(sample, counts[0][0], counts[-1][0], now)], instructions, now, on_committed)
        return Receipt("stored", instructions=instructions)

    def add_score(self, score: Score, now: float, on_committed: OnCommitted | None = None) -> Receipt:
        """Enter a reward, or why there is none."""
        standing = self.state.member_state(score.group_id, score.index)
        if standing != "generated":
            return self._not_wanted(score.group_id, score.index, standing, on_committed)
        num_tokens = self._payloads.num_tokens(score.group_id, score.index)
        if error := score_error(score, num_tokens, needs_reference=self._needs_reference):
            failure = SampleFailure(score.group_id, score.index, score.attempt, "reward", error)
            return Receipt("stored", instructions=self._fail(failure, now, on_committed))
        self._payloads.score(score)
        instructions = self.state.handle(SampleScored(score.group_id, score.index, score.reward), now)
        self._write([ScoreRecord(score, now)], instructions, now, on_committed)
        return Receipt("stored", instructions=instructions)

    def add_failure(self, failure: SampleFailure, now: float, on_committed: OnCommitted | None = None) -> Receipt:
        """Enter that a member will never be trained; a repeat where it is being generated again since."""
        standing = self.state.member_state(failure.group_id, failure.index)
        if standing == "pending" and failure.attempt < self.state.groups[failure.group_id].attempt:
            standing = "over"
        if standing not in {"pending", "generated"}:
            return self._not_wanted(failure.group_id, failure.index, standing, on_committed)
        return Receipt("stored", instructions=self._fail(failure, now, on_committed))

    def submit_group(
        self, prompt: Prompt, samples: Sequence[Sample], submitter: str, now: float, on_committed: OnCommitted | None = None
    ) -> Receipt:
        """Take in a whole group that outside code generated; it is checked and scored like any other.

        Group id and member indices in `samples` are replaced by new ones; the receipt names the group. It is refused, with
        nothing changed and `on_committed` not called, where a sample is invalid or there is no place for a group as old as that.
        """
        group = examine_group(
            prompt,
            samples,
            submitter,
            newest_version=self.newest_version,
            screen=self.state.limits.screen,
            tokens_per_row=self._tokens_per_row,
        )
        if isinstance(group, str):
            return Receipt("refused", group)
        if not self.state.has_place(group.oldest):
            why = f"no place for a group with tokens of version {group.oldest} now; try again after the next step"
            return Receipt("refused", why)
        group_id = self.state.next_group_id
        instructions = self.state.handle(group.added(group_id), now)
        held = self._payloads.open(group_id, prompt)
        held.samples.update(group.held(group_id))
        self._write(group.records(held.samples, group_id, now, self.cursor), instructions, now, on_committed)
        return Receipt("stored", instructions=instructions, group_id=group_id)

    def score_request(self, group_id: int, index: int) -> ScoreRequest:
        """Return the message that asks a reward worker for a member's score."""
        return self._payloads.score_request(group_id, index)

    def sample(self, group_id: int, index: int) -> Sample:
        """Return a held member that is generated and not taken yet."""
        return self._payloads.groups[group_id].samples[index]

    def outstanding_scores(self) -> list[ScoreRequest]:
        """Return a request for every member generated and not scored yet, by rules or by models: all that a resume asks again."""
        return [self.score_request(member.group_id, member.index) for member in self.state.unscored()]

    # -- steps -----------------------------------------------------------------------------------------------------------

    def take(self, step: int, now: float, on_committed: OnCommitted | None = None) -> TakenStep | Waiting:
        """Take the groups of `step`, or say what it waits for.

        Args:
            step: The next one, or one of `learner_restarted`'s, which gives the very same groups again.
            now: Clock seconds.
            on_committed: Send the batch to the learner only from here: a step that is trained must be in the books.

        Raises:
            LedgerError: A step to be repeated has lost its payloads.
        """
        *dropped, decision = self.state.handle(TakeStep(step), now)
        if isinstance(decision, TakeGroups):
            if decision.repeat:
                taken = self._steps.repeat(decision, self.ledger, self.newest_version)
                self.ledger.write((), on_committed)
            else:
                taken = self._steps.first(decision, self._payloads.take(decision.group_ids), dropped)
                record = TakenRecord(step, decision.group_ids, taken.params, taken.staleness.token_max, now)
                self._write([record], dropped, now, on_committed)
            return taken
        if dropped:
            self._write([], dropped, now)
        if isinstance(decision, Wait):
            return Waiting(step, decision.reason, decision.group_ids, dropped)
        assert isinstance(decision, NotEnough)
        return Waiting(step, f"{decision.have} of {decision.need} groups are ready for step {step}", (), dropped)

    def mark_trained(self, step: int, now: float, on_committed: OnCommitted | None = None) -> Sequence[BufferInstruction]:
        """Note that the optimizer step is done; harmless when repeated."""
        instructions = self.state.handle(StepTrained(step), now)
        self._steps.trained(step)
        group_ids = tuple(moved.group_id for moved in instructions if isinstance(moved, GroupMoved))
        self.ledger.write((TrainedRecord(step, group_ids, now),) if group_ids else (), on_committed)
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
        self.state.handle(LearnerRestarted(version), now)
        if last:
            self.ledger.write((RestartedRecord(version, now),))
        self.newest_version = max(self.newest_version, version)
        to_repeat = self.state.steps_to_repeat()
        self._steps.check_repeatable(to_repeat)
        return to_repeat

    def drop_group(self, group_id: int, reason: str, now: float) -> Sequence[BufferInstruction]:
        """Drop a live group on somebody's decision; the reason goes into the books."""
        instructions = self.state.handle(GroupDropped(group_id, reason), now)
        self._write([], instructions, now)
        return instructions

    def forget(self, before_step: int, now: float) -> None:
        """Let go of payloads of steps before this one: call with the version of the OLDEST checkpoint kept."""
        self.state.handle(StepsForgotten(before_step), now)
        self._steps.forget(before_step)
        self.ledger.write((ForgetRecord(before_step),))

    # -- the books -------------------------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        """Return the groups per state."""
        return self.state.counts()

    def check(self) -> None:
        """Compare state, payloads and ledger; waits for the ledger to catch up.

        Raises:
            AssertionError: They do not say the same: something was lost or counted twice.
        """
        self.state.check_invariants()
        assert self._payloads.groups.keys() == self.state.groups.keys(), "payloads are held of other groups than the live ones"
        self.ledger.sync()
        expected, on_disk = self.counts().by_state, self.ledger.state_counts()
        assert on_disk == expected, f"ledger has {on_disk}, state {expected}"

    def close(self) -> None:
        """Commit everything and release the ledger."""
        self.ledger.close()

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _not_wanted(self, group_id: int, index: int, standing: str, on_committed: OnCommitted | None) -> Receipt:
        self.ledger.write((), on_committed)
        return not_wanted(group_id, index, standing)

    def _fail(self, failure: SampleFailure, now: float, on_committed: OnCommitted | None) -> Sequence[BufferInstruction]:
        instructions = self.state.handle(SampleFailed(failure.group_id, failure.index, failure.reason), now)
        record = FailureRecord(failure.group_id, failure.index, failure.attempt, failure.stage, failure.reason, now)
        self._write([record], instructions, now, on_committed)
        self._payloads.drop_member(failure.group_id, failure.index)
        return instructions

    def _write(
        self, records: list[Record], moves: Sequence[BufferInstruction], now: float, on_committed: OnCommitted | None = None
    ) -> None:
        """Write what happened and the moves that follow from it as one unit."""
        records.extend(self._moves.records(moves, now))
        if records or on_committed is not None:
            self.ledger.write(records, on_committed)
