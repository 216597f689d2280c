"""The controller's data path between connections and buffer: prompts out to generators, samples and scores in.

Decides nothing: the buffer's state machine decides which generator gets a group and what a sample changes; this file sends and
receives. Invariants: every group handed out is in an outbox, at a generator, or in the buffer; each member that was handed out
frees its slot once, and counts as generated once. Messages that arrive together are entered together; the controller acknowledges
them once they are in the ledger.

Everything here returns at once. Arriving messages call `changed`; then the controller's loops call `issue` and `scores.dispatch`.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from asyncrl.buffer import events as ev
from asyncrl.buffer.buffer import Buffer
from asyncrl.buffer.group import STALE
from asyncrl.clock import Clock
from asyncrl.config.run import RunConfig
from asyncrl.control.evaluation import Evaluation, sampling_of
from asyncrl.control.join import JOINED_PREFIX
from asyncrl.control.lifecycle.failure_watch import FailureWatch
from asyncrl.control.peers import Peers
from asyncrl.control.scoring import ScoreDispatcher
from asyncrl.errors import shown
from asyncrl.schema.control import AbortGroup
from asyncrl.schema.samples import (
    GroupWork,
    InferRequest,
    InferResult,
    Prompt,
    Sample,
    SampleFailure,
    Samples,
    Score,
    ScoreRequest,
    Scores,
)
from asyncrl.schema.status import RELEASED, ExternalGroup, SubmitResult
from asyncrl.tasks.asked import AskedPrompts
from asyncrl.tasks.task import PromptSequence

log = logging.getLogger(__name__)

FRUITLESS_ADVICE = (
    "and supervision.stall_timeout_s ends a run that trains nothing; look at the rewards, at algorithm.preference (pairs, "
    "chosen_at_least, rejected_at_most), at algorithm.group_size and generate.sampling.temperature"
)
EVALUATION_ROOM = 2
"""Maximum number of evaluation samples at a generator, in multiples of its slots."""
MOST_GUEST_FAILURES = 16
"""After this many failed samples in a row, a joined generator's connection is ended."""
MOST_KIND_CHARS = 200


class Dispatcher:
    """Groups on their way out and samples on their way in."""

    def __init__(self, config: RunConfig, buffer: Buffer, prompts: PromptSequence, peers: Peers, clock: Clock) -> None:
        self.buffer = buffer
        self.state = buffer.state
        self.evaluation: Evaluation | None = None
        """The running evaluation; its prompts are sent beside training groups."""
        self.asked = AskedPrompts() if config.learner.kind == "driven" else None
        """Prompts given by a caller, which replace the task's prompts; None: the task's prompts."""
        self.scores = ScoreDispatcher({model.name: model.weight for model in config.inference.reward_models})
        self.failures = FailureWatch(config.supervision.max_failed_share)
        self._newest_failure = "", ""
        self.refused_samples = 0
        self.generated_tokens = 0
        self.fruitless = ""
        """What is still missing although samples arrive, as text: then only a trained step counts as progress. Else empty."""
        self.changed: Callable[[], None] = lambda: None
        """Called whenever it may be possible to issue groups, request scores or train."""
        self._config = config
        self._prompts = prompts
        self._peers = peers
        self._clock = clock
        self.sampling = sampling_of(config)
        """Sampling of groups issued from now on."""
        self._groups_held = self._evaluation_held = False
        self._has_turn = True
        self._outboxes: defaultdict[str, deque[GroupWork]] = defaultdict(deque)
        """Groups that wait to be sent, only for generators that have some."""
        self._out: defaultdict[str, dict[tuple[int, int], set[int]]] = defaultdict(dict)
        """Members that a generator has been given and has not answered, by group and attempt."""
        self._guest_failures: dict[str, tuple[int, str]] = {}
        """For each joined generator, the number of its last samples that failed in a row, and why the first did."""
        self._spoiled: set[int] = set()
        """Groups that continue without a member that failed at a joined generator."""

    # -- what goes out ---------------------------------------------------------------------------------------------------

    def issue(self) -> None:
        """Hand out evaluation prompts and groups while there are places, and send as much as the windows allow."""
        self._place_evaluation()
        while (issue := self.state.next_issue()) is not None:
            now, size = self._clock.now(), self._config.algorithm.members_per_group
            if isinstance(issue, ev.ReissueGroup):
                group = self.buffer.reissue(issue.group_id, issue.generator, issue.version, now)
            elif self.asked is not None:
                if not self.asked.queue:
                    break
                first = self.asked.queue.popleft()
                group = self.buffer.issue(
                    first.prompt, issue.generator, version=issue.version, group_size=first.size or size, now=now
                )  # fmt: skip
                self.asked.issued(first, group.group_id, issue.version)
            else:
                (replaces, prompt), cursor = self.buffer.returned_prompt() or (None, None), self.buffer.cursor
                if prompt is None:
                    prompt, cursor = self._next_prompt(cursor)
                group = self.buffer.issue(
                    prompt, issue.generator, version=issue.version, group_size=size, now=now, cursor=cursor, replaces=replaces,
                )  # fmt: skip
            sampling, asked = self.sampling, self.asked.by_group.get(group.group_id) if self.asked is not None else None
            if asked is not None and asked.max_new_tokens:
                most = min(asked.max_new_tokens, sampling.max_new_tokens)
                sampling = msgspec.structs.replace(sampling, max_new_tokens=most)
            work = GroupWork(
                group.group_id, group.attempt, self.buffer.held[group.group_id].prompt, group.pending, sampling,
                self._config.seed, greedy_index=self.state.limits.screen.greedy_index,
                is_followed=asked is not None and asked.is_followed,
            )  # fmt: skip
            self._hand_out(issue.generator, work)
        for name, outbox in list(self._outboxes.items()):
            peer = self._peers.get(name)
            while outbox and peer is not None and peer.offer(outbox[0]):
                outbox.popleft()
            if not outbox:
                del self._outboxes[name]

    def _place_evaluation(self) -> None:
        evaluation = self.evaluation
        if evaluation is None or self._evaluation_held or not self._has_turn:
            return
        for peer in self._peers.of("generator"):
            if peer.live_version < evaluation.version:
                continue
            while self.state.pool.members_on(peer.name) < EVALUATION_ROOM * peer.num_slots:
                work = evaluation.next_work(peer.name)
                if work is None:
                    return
                self._hand_out(peer.name, work)
                self.state.handle(ev.MembersStarted(peer.name, len(work.indices)), self._clock.now())

    def _hand_out(self, generator: str, work: GroupWork) -> None:
        self._outboxes[generator].append(work)
        self._out[generator][work.group_id, work.attempt] = set(work.indices)

    def _next_prompt(self, cursor: int) -> tuple[Prompt, int]:
        """Return the next prompt that is not set aside (any prompt if all are), and the position after it."""
        for index in range(cursor, cursor + self._prompts.epoch_length):
            if (prompt := self._prompts[index]).prompt_id not in self.failures.set_aside:
                return prompt, index + 1
        return self._prompts[cursor], cursor + 1

    def change(self, config: RunConfig, what: str) -> None:
        """Apply a config that was changed during the run."""
        self.buffer.change(config, what, self._clock.now())
        self._config, self.sampling = config, sampling_of(config)
        self.changed()

    def hold(self, *, groups: bool, evaluation: bool) -> None:
        """Issue no training groups, or no evaluation prompts, until told otherwise."""
        self._groups_held, self._evaluation_held = groups, evaluation
        self.take_turn(self._has_turn)

    def take_turn(self, has_turn: bool) -> None:
        """On a shared device, issue groups only during the generators' turn."""
        self._has_turn = has_turn
        self.tell(ev.IssueResumed() if has_turn and not self._groups_held else ev.IssuePaused())

    # -- who is there ----------------------------------------------------------------------------------------------------

    def tell(self, event: ev.BufferEvent) -> None:
        """Tell the buffer about a generator: it is ready, has another number of slots, samples with a version, or leaves."""
        if isinstance(event, ev.GeneratorReady):
            self._outboxes.pop(event.name, None)
            self._out.pop(event.name, None)
        self.state.handle(event, self._clock.now())
        self.changed()

    def generator_dead(self, name: str) -> None:
        """Hand out again everything that a dead generator held."""
        self._outboxes.pop(name, None)
        self._out.pop(name, None)
        self._guest_failures.pop(name, None)
        if self.evaluation is not None:
            self.evaluation.generator_lost(name)
        lost = self.buffer.generator_lost(name, self._clock.now())
        if name.startswith(JOINED_PREFIX):
            self._spoiled.update(item.group_id for item in lost if isinstance(item, ev.GroupMoved) and item.after == "failed")
        self.follow(lost)
        self.changed()

    def judge_dead(self, name: str) -> None:
        """Ask other workers for the scores that a dead reward or inference worker had not given."""
        self._enter_scores(self.scores.worker_lost(name))
        self.changed()

    def holds_nothing(self, name: str) -> bool:
        """Return whether a generator has finished all it was given."""
        return not self._outboxes.get(name) and self.state.pool.members_on(name) == 0

    # -- what comes in ---------------------------------------------------------------------------------------------------

    def take_samples(self, arrived: Sequence[Samples], generator: str) -> list[Samples]:
        """Store finished samples and request their rewards; return the samples that were awaited."""
        awaited, num_freed = list[Samples](), 0
        trained = [samples for samples in arrived if samples.purpose == "train"]
        for samples in trained:
            self._compare_prompts(samples)
        receipts = iter(self.buffer.add_samples(trained, self._clock.now()))
        for samples in arrived:
            wanted = self._answered(generator, samples.group_id, samples.attempt, samples.indices)
            num_freed += len(wanted)
            if samples.purpose == "eval":
                if wanted:
                    self._note_guest(generator, self._evaluate(samples, generator))
            else:
                receipt = next(receipts)
                wanted.update(receipt.stored)
                if wanted:
                    self._note_guest(generator, next(iter(receipt.refused), ""), samples.group_id, len(receipt.refused))
                self._note_refused(receipt.refused)
                self.follow(receipt.instructions)
            if wanted:
                awaited.append(samples)
                self.generated_tokens += sum(samples.lengths)
        self.tell(ev.MembersFinished(generator, num_freed))
        return awaited

    def _compare_prompts(self, samples: Samples) -> None:
        """Drop a group for which two generators report different prompt tokens, since either may be wrong."""
        if all(self.state.member_state(samples.group_id, index) != "pending" for index in samples.indices):
            return
        known, source = self.buffer.held[samples.group_id].prompt_ids()
        if known and known != samples.prompt_ids:
            reason = "its generators say different prompts"
            log.warning("group %d is dropped: %s (%s, %s)", samples.group_id, reason, source, samples.generator)
            for generator in (source, samples.generator):
                self._note_guest(generator, reason)
            self.follow(self.buffer.drop_group(samples.group_id, reason, self._clock.now()))

    def _answered(self, generator: str, group_id: int, attempt: int, indices: Iterable[int]) -> set[int]:
        """Note that a generator has answered these members; return those that it had been given."""
        members = self._out[generator].get((group_id, attempt), set())
        answered = members.intersection(indices)
        members -= answered
        if answered and not members:
            del self._out[generator][group_id, attempt]
        return answered

    def take_failure(self, failure: SampleFailure, generator: str) -> None:
        """Note a failed member; ignored if its group is over, or was handed out again."""
        why = failure.reason or "no reason given"
        given = generator, failure.group_id, failure.attempt, (failure.index,)
        if failure.purpose == "eval":
            freed = self._answered(*given)
            if freed and self.evaluation is not None:
                self.evaluation.take_failure(failure.group_id, failure.index, generator)
                if not generator.startswith(JOINED_PREFIX):  # what fails at a joined one is tried again elsewhere
                    self._note_failure(failure.stage, failure.kind, failure.reason, failure.trace)
            self._note_guest(generator, why)
        else:
            receipt = self.buffer.add_failure(failure, self._clock.now())
            if receipt.stored:
                self._note_failure(failure.stage, failure.kind, failure.reason, failure.trace)
                self._note_guest(generator, why, failure.group_id)
            self._note_refused(receipt.refused)
            self.follow(receipt.instructions)  # which may take back what was not sent yet
            freed = self._answered(*given)
        self.tell(ev.MembersFinished(generator, len(freed)))

    def _evaluate(self, samples: Samples, generator: str) -> str:
        """Request the rewards of an evaluation's samples; return what is wrong with an invalid one, which counts as failed."""
        evaluation = self.evaluation
        if evaluation is None or not evaluation.awaits(samples):
            return ""
        fault, faults = "", self.buffer.examine(samples)
        for index, counts in zip(samples.indices, faults, strict=True):
            if isinstance(counts, str):
                fault = f"invalid sample from {samples.generator}: {counts}"
                self._note_refused([fault])
                evaluation.take_failure(samples.group_id, index, generator)
        if all(isinstance(counts, str) for counts in faults):
            return fault
        valid = [sample for sample, counts in zip(samples.members(), faults, strict=True) if not isinstance(counts, str)]
        self._ask_scores(evaluation.take_samples(valid), valid)
        return fault

    def _note_guest(self, generator: str, fault: str, group_id: int = -1, num_failed: int = 1) -> None:
        """Count a joined generator's failures in a row; a group that fails because of it is no failure of the run."""
        if not generator.startswith(JOINED_PREFIX):
            return
        if not fault:
            self._guest_failures.pop(generator, None)
            return
        num_before, first = self._guest_failures.get(generator, (0, fault))
        self._guest_failures[generator] = num_before + num_failed, first
        if group_id >= 0:
            self._spoiled.add(group_id)

    def why_unfit(self, generator: str) -> str:
        """Return, once, why a joined generator must leave: all its last samples failed. Empty for any other generator."""
        num_failed, first = self._guest_failures.get(generator, (0, ""))
        if num_failed < MOST_GUEST_FAILURES:
            return ""
        del self._guest_failures[generator]
        return f"{num_failed} of its samples in a row failed, the first: {' '.join(shown(first[:MOST_KIND_CHARS]).split())}"

    def take_answers(self, answers: Iterable[Scores | InferResult]) -> None:
        """Enter the answers of a reward or inference worker."""
        self._enter_scores([scores for answer in answers if (scores := self.scores.take(answer)) is not None])
        self.changed()

    def submit(self, group: ExternalGroup) -> SubmitResult:
        """Enter a group that outside code generated."""
        submitter = group.samples[0].generator if group.samples else "outside"
        receipt = self.buffer.submit_group(group.prompt, group.samples, submitter, self._clock.now())
        if receipt.refused:
            self.refused_samples += len(group.samples)
            return SubmitResult(group_id=-1, refused=receipt.refused[0])
        self.follow(receipt.instructions)
        self.changed()
        return SubmitResult(group_id=receipt.group_id)

    def release(self, group_ids: Iterable[int]) -> None:
        """Drop these groups unless they are taken: their caller will not train them, perhaps because they are too old."""
        for group_id in group_ids:
            if (group := self.state.groups.get(group_id)) is not None:
                is_stale = bool(group.trained) and not group.is_fit(self.state.next_step, self.state.limits)
                self.follow(self.buffer.drop_group(group_id, STALE if is_stale else RELEASED, self._clock.now()))
        self.changed()

    # -- what the buffer wants -------------------------------------------------------------------------------------------

    def follow(self, instructions: Iterable[ev.BufferInstruction]) -> None:
        """Carry out the buffer's instructions."""
        for item in instructions:
            match item:
                case ev.ScoreMembers(group_id, indices):
                    held = self.buffer.held[group_id]
                    samples = [held.samples[index] for index in indices]
                    self._ask_scores(ScoreRequest.of(held.prompt, samples), samples)
                case ev.GroupMoved(after="ready"):
                    if (group := self.state.groups.get(item.group_id)) is not None:
                        self.failures.group_completed(group.prompt_id)
                        if self.asked is not None:
                            self.asked.ready(item.group_id, group.oldest)
                    self._spoiled.discard(item.group_id)
                    self.fruitless = ""
                case ev.GroupMoved(group_id=group_id, after="dropped" | "failed"):
                    if self.asked is not None:
                        kind, said = self._newest_failure
                        self.asked.over(group_id, f"{item.after}: {said if item.reason == kind else item.reason}")
                    if item.after == "dropped":
                        self.failures.group_completed(item.prompt_id)
                    elif group_id in self._spoiled:
                        pass  # a joined generator's failure says nothing of the run
                    elif self.failures.group_failed(item.prompt_id, item.reason):
                        log.warning("prompt %s failed too often and is set aside: %s", item.prompt_id, item.reason)
                    self._spoiled.discard(group_id)
                    if item.generator:
                        self._abort(group_id, item.generator)
                    self.changed()  # its place is free
                case ev.ScreenLifted():
                    log.warning(
                        "%d groups in a row taught nothing (%s) and were dropped; from group %d on such groups are trained all "
                        "the same (algorithm.max_resamples): the task is too easy, too hard, or its answers do not fit",
                        item.num_dropped, item.reason, item.group_id,
                    )  # fmt: skip
                case ev.ScreenStands():
                    self.fruitless = f"a group with a preference pair: {item.num_dropped} in a row had none and were dropped"
                    log.warning("waiting for %s; sampling goes on, %s", self.fruitless, FRUITLESS_ADVICE)

    def _ask_scores(self, rules: ScoreRequest, samples: Sequence[Sample]) -> None:
        """Request scores from rules, models, or both, depending on the config and the samples' purpose."""
        requests: list[ScoreRequest | InferRequest] = [rules] if self._config.has_rules else []
        if self._config.inference.reward_models or (self._config.has_reference_worker and rules.purpose == "train"):
            # The learner divides its logits by the temperature, and so must the reference.
            requests += [
                InferRequest(
                    sample.group_id, sample.index, sample.attempt, sample.prompt_ids, sample.token_ids,
                    self.sampling.temperature, sample.purpose,
                )
                for sample in samples
            ]  # fmt: skip
        self.scores.ask(*requests, now=self._clock.now())

    def _enter_scores(self, complete: Sequence[Scores]) -> None:
        """Store rewards, or the reasons why there are none."""
        fault = "the reward of an evaluation is not finite"
        for scores in complete:
            judged = scores.scores
            if scores.purpose == "eval":
                judged = tuple(
                    score
                    if all(map(math.isfinite, (score.reward, *score.parts.values())))
                    else Score(score.index, 0.0, error=fault, error_kind=fault)
                    for score in judged
                )
            for score in judged:
                if score.error:
                    self._note_failure("reward", score.error_kind, score.error, score.trace)
                elif self.failures.sample_scored(score.over_limit):
                    log.warning("a sample scored 0: %s", score.over_limit)
            if scores.purpose == "eval" and self.evaluation is not None:
                self.evaluation.take_scores(scores.group_id, judged)
        trained = [scores for scores in complete if scores.purpose == "train"]
        for receipt in self.buffer.add_scores(trained, self._clock.now()):
            self._note_refused(receipt.refused)
            self.follow(receipt.instructions)

    def _note_failure(self, stage: str, kind: str, reason: str, trace: str) -> None:
        """Count a failed sample; the first of its kind is logged with its traceback."""
        kind, reason, trace = shown(kind, MOST_KIND_CHARS), shown(reason), shown(trace)
        self._newest_failure = kind, reason
        if self.failures.sample_failed(stage, kind, reason, trace):
            log.warning("a sample failed at %s (%s): %s%s", stage, kind or "no kind", reason, f"\n{trace}" if trace else "")

    def _note_refused(self, reasons: Sequence[str]) -> None:
        for reason in reasons:
            self.refused_samples += 1
            log.warning("refused a sample: %s", reason)

    def _abort(self, group_id: int, generator: str) -> None:
        """Tell a generator to abort a group that is over; members it has begun come back as failures, which free its slots."""
        outbox = self._outboxes.get(generator, deque())
        unsent = [work for work in outbox if work.group_id == group_id and work.purpose == "train"]
        for work in unsent:
            outbox.remove(work)
            self._out[generator].pop((work.group_id, work.attempt), None)
            self.tell(ev.MembersFinished(generator, len(work.indices)))
        peer = self._peers.get(generator)
        if peer is not None and not unsent:
            peer.tell(AbortGroup(group_id))
