"""The controller's data path: prompts out to generators, samples and scores in, everything between the wire and the buffer.

Owns nothing that decides: admission says who gets a group, the buffer says what a sample means, this joins their words to
connections. Invariants: a message is acknowledged exactly once, and only when the ledger holds what it brought (evaluation
samples, which the ledger does not know, at once); every group sent is either in an outbox, at a generator, or in the buffer.

Everything here returns at once and runs on the controller's event loop. Called by control/controller.py.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable

import msgspec

from asyncrl.buffer.buffer import Buffer, Receipt, WorkOrder
from asyncrl.buffer.events import BufferInstruction, GroupMoved, Reissue, ScoreMember, ScreenLifted, ScreenStands
from asyncrl.clock import Clock
from asyncrl.config.run import RunConfig
from asyncrl.control.evaluation import Evaluation, sampling_of
from asyncrl.control.peers import Peers
from asyncrl.control.scoring import ScoringDesk, infer_request
from asyncrl.generate.admission import Admission
from asyncrl.generate.admission_events import (
    AdmissionEvent,
    AdmissionInstruction,
    GeneratorLeaving,
    GeneratorLost,
    GeneratorReady,
    GroupAdded,
    GroupGone,
    GroupIsReady,
    GroupLost,
    IssueGroup,
    IssueReturned,
    MembersFinished,
    MembersStarted,
    Paused,
    Resumed,
    RoomChanged,
    VersionIsLive,
)
from asyncrl.schema.control import AbortGroup
from asyncrl.schema.samples import GroupWork, InferResult, Sample, SampleFailure, Score, ScoreRequest
from asyncrl.schema.status import ExternalGroup, SubmitResult
from asyncrl.tasks.sampler import PromptSequence

log = logging.getLogger(__name__)

FRUITLESS_ADVICE = (
    "and supervision.stall_timeout_s ends a run that trains nothing; look at the rewards, at algorithm.preference (pairs, "
    "chosen_at_least, rejected_at_most), at algorithm.group_size and generate.sampling.temperature"
)
EVALUATION_ROOM = 2
"""Evaluation samples a generator may hold, in multiples of its slots."""


class Flow:
    """Groups on their way out and samples on their way in."""

    def __init__(
        self, config: RunConfig, buffer: Buffer, admission: Admission, prompts: PromptSequence, peers: Peers, clock: Clock
    ) -> None:
        """Join the parts."""
        self.buffer = buffer
        self.admission = admission
        self.evaluation: Evaluation | None = None
        self.desk = ScoringDesk({model.name: model.weight for model in config.inference.reward_models})
        self.refused_samples = 0
        self.generated_tokens = 0
        self.fruitless = ""
        """What has not come for long though samples do, in words: then only a trained step is progress. Else empty."""
        self.changed: Callable[[], None] = lambda: None
        """Called whenever a step may have become possible."""
        self._config = config
        self._prompts = prompts
        self._peers = peers
        self._clock = clock
        self._sampling = sampling_of(config)
        self._greedy_index = buffer.state.limits.screen.greedy_index
        self._is_held = False
        self._evaluation_held = False
        self._has_turn = True
        self._outboxes: defaultdict[str, deque[GroupWork]] = defaultdict(deque)
        """Of the generators for which something waits; no others, so that `pump` looks at nobody in vain."""

    # -- generators ------------------------------------------------------------------------------------------------------

    def generator_ready(self, name: str, num_slots: int, version: int) -> None:
        """Take a generator in; it gets work once its version is 0 or more."""
        self._outboxes.pop(name, None)
        self._tell(GeneratorReady(name, num_slots, version))

    def room_changed(self, name: str, num_slots: int) -> None:
        """Note how many requests a generator's engine can run at once by now."""
        self._tell(RoomChanged(name, num_slots))
        self.pump()

    def version_live(self, name: str, version: int) -> None:
        """Note that a generator samples with this version."""
        self._tell(VersionIsLive(name, version))
        self.pump()

    def generator_dead(self, name: str) -> None:
        """Hand out again whatever it held."""
        self._outboxes.pop(name, None)
        self._tell(GeneratorLost(name))
        if self.evaluation is not None:
            self.evaluation.generator_lost(name)
        self.follow(self.buffer.generator_lost(name, self._clock.now()))
        self.pump()

    def generator_leaving(self, name: str) -> None:
        """Give it nothing more; groups that wait for its window still go out."""
        self._tell(GeneratorLeaving(name))

    def holds_nothing(self, name: str) -> bool:
        """Return whether a generator has finished all it was given."""
        return not self._outboxes.get(name) and self.admission.members_on(name) == 0

    @property
    def has_generated_all(self) -> bool:
        """Return whether the generators have finished all they were given."""
        return all(self.holds_nothing(peer.name) for peer in self._peers.of("generator"))

    @property
    def has_generated_a_step(self) -> bool:
        """Return whether as many groups as a step takes are generated, and fewer have their scores."""
        counts, needed = self.buffer.counts(), self._config.algorithm.groups_per_step
        return counts.ready < needed <= counts.ready + counts.scoring

    def judge_dead(self, name: str) -> None:
        """Ask others for what a reward or inference worker owed."""
        for score in self.desk.worker_lost(name):
            self._enter_score(score, lambda: None)
        self.pump()

    def hold(self, *, evaluation_too: bool) -> None:
        """Issue no training group until `release`; with `evaluation_too`, nothing at all."""
        self._is_held, self._evaluation_held = True, evaluation_too
        self._tell(Paused())

    def release(self) -> None:
        """Issue again."""
        self._is_held = self._evaluation_held = False
        if self._has_turn:
            self._tell(Resumed())
        self.pump()

    def take_turn(self, has_turn: bool) -> None:
        """Issue only while it is the generators' turn on a device that they share."""
        self._has_turn = has_turn
        if not has_turn:
            self._tell(Paused())
        elif not self._is_held:
            self._tell(Resumed())
        self.pump()

    def start_evaluation(self, evaluation: Evaluation) -> None:
        """Send this evaluation's prompts out beside whatever else is going on."""
        self.evaluation = evaluation
        self.pump()

    # -- what comes in ---------------------------------------------------------------------------------------------------

    def take_sample(self, sample: Sample, ack: Callable[[], None]) -> None:
        """Store a finished sample and ask for its reward."""
        self.generated_tokens += sample.num_tokens
        if sample.purpose == "eval":
            request = self.evaluation.take_sample(sample) if self.evaluation is not None else None
            if request is not None:
                self._ask_score(request, sample)
            ack()
        else:
            self._settle(self.buffer.add_sample(sample, self._clock.now(), ack))
        self._tell(MembersFinished(sample.generator))
        self.pump()

    def take_failure(self, failure: SampleFailure, generator: str, ack: Callable[[], None]) -> bool:
        """Note a member that will never come; return False where nobody waits for it: its group is over, or given out again."""
        is_awaited = True
        if failure.purpose == "eval":
            if self.evaluation is not None:
                self.evaluation.take_verdict(failure)
            ack()
        else:
            receipt = self.buffer.add_failure(failure, self._clock.now(), ack)
            is_awaited = receipt.status == "stored"
            self._settle(receipt)
        self._tell(MembersFinished(generator))
        self.pump()
        return is_awaited

    def take_answer(self, answer: Score | InferResult, ack: Callable[[], None]) -> Score | None:
        """Take in what a reward or inference worker says; return the score where it is complete with that.

        An answer that completes nothing is acknowledged at once: were it held back until the other half came, full windows of
        halves could wait for each other.
        """
        score = self.desk.take(answer)
        if score is None:
            ack()
        else:
            self._enter_score(score, ack)
        self.pump()
        return score

    def submit(self, group: ExternalGroup) -> SubmitResult:
        """Take in a group that outside code generated."""
        submitter = group.samples[0].generator if group.samples else "outside"
        receipt = self.buffer.submit_group(group.prompt, group.samples, submitter, self._clock.now())
        if receipt.status == "refused":
            self.refused_samples += len(group.samples)
            return SubmitResult(group_id=-1, refused=receipt.reason)
        self._tell(GroupAdded())
        self.follow(receipt.instructions)
        self.pump()
        return SubmitResult(group_id=receipt.group_id)

    # -- what goes out ---------------------------------------------------------------------------------------------------

    def pick_up(self) -> None:
        """After a resume: ask again for every score that had not come, hand out again every group that is with nobody."""
        for request in self.buffer.outstanding_scores():
            self._ask_score(request, self.buffer.sample(request.group_id, request.index))
        self.follow(self.buffer.unplaced())

    def follow(self, instructions: Iterable[BufferInstruction]) -> None:
        """Carry out what the buffer asks for."""
        for item in instructions:
            if isinstance(item, ScoreMember):
                request = self.buffer.score_request(item.group_id, item.index)
                self._ask_score(request, self.buffer.sample(item.group_id, item.index))
            elif isinstance(item, Reissue):
                self._tell(GroupLost(item.group_id, len(item.indices), item.version))
            elif isinstance(item, GroupMoved):
                self._note_move(item)
            elif isinstance(item, ScreenLifted):
                log.warning(
                    "%d groups in a row taught nothing (%s) and were dropped; from group %d on such groups are trained all the "
                    "same (algorithm.max_resamples): the task is too easy, too hard, or its answers do not fit",
                    item.num_dropped, item.reason, item.group_id,
                )  # fmt: skip
            elif isinstance(item, ScreenStands):
                self.fruitless = f"a group with a preference pair: {item.num_dropped} in a row had none and were dropped"
                log.warning("waiting for %s; sampling goes on, %s", self.fruitless, FRUITLESS_ADVICE)

    def pump(self) -> None:
        """Send what can be sent: evaluation prompts, groups that found a window full, reward requests."""
        self._place_evaluation()
        for name, outbox in list(self._outboxes.items()):
            peer = self._peers.get(name)
            while outbox and peer is not None and peer.offer(outbox[0]):
                outbox.popleft()
            if not outbox:
                del self._outboxes[name]
        self.desk.dispatch(self._peers)
        self.changed()

    def _ask_score(self, request: ScoreRequest, sample: Sample) -> None:
        """Ask the rules, the models, or both, as the config and the sample's purpose want it."""
        config = self._config
        asks_models = bool(config.inference.reward_models) or (config.has_reference_worker and sample.purpose == "train")
        self.desk.ask(
            request if config.has_rules else None,
            infer_request(sample, self._sampling.temperature) if asks_models else None,
            self._clock.now(),
        )

    def _enter_score(self, score: Score, ack: Callable[[], None]) -> None:
        """Store a reward, or the reason why there is none."""
        if score.purpose == "eval":
            if self.evaluation is not None:
                self.evaluation.take_verdict(score)
            ack()
        else:
            self._settle(self.buffer.add_score(score, self._clock.now(), ack))

    def _note_move(self, move: GroupMoved) -> None:
        if move.after == "ready" and move.before in {"running", "scoring"}:
            self.fruitless = ""
            self._tell(GroupIsReady(move.group_id))
        elif move.after in {"dropped", "failed"}:
            log.debug("group %d %s: %s", move.group_id, move.after, move.reason)
            if move.generator:
                self._abort(move.group_id, move.generator)
            self._tell(GroupGone(move.group_id, was_ready=move.before not in {"running", "scoring"}))

    def _abort(self, group_id: int, generator: str) -> None:
        """Have a generator stop at a group that is over; what it has begun comes back as failures, which free its slots."""
        outbox = self._outboxes.get(generator, deque())
        unsent = [work for work in outbox if work.group_id == group_id and work.purpose == "train"]
        for work in unsent:
            outbox.remove(work)
            self._tell(MembersFinished(generator, len(work.indices)))
        peer = self._peers.get(generator)
        if peer is not None and not unsent:
            peer.tell(AbortGroup(group_id))

    def _settle(self, receipt: Receipt) -> None:
        if receipt.status == "refused":
            self.refused_samples += 1
            log.warning("refused a sample: %s", receipt.reason)
        self.follow(receipt.instructions)

    def _tell(self, event: AdmissionEvent) -> None:
        for instruction in self.admission.handle(event, self._clock.now()):
            self._issue(instruction)

    def _issue(self, instruction: AdmissionInstruction) -> None:
        order = self._new_group(instruction) if isinstance(instruction, IssueGroup) else self.buffer.reissue(
            instruction.group_id, instruction.generator, version=instruction.version, now=self._clock.now()
        )  # fmt: skip
        if order is None:
            if isinstance(instruction, IssueGroup):
                self._tell(IssueReturned(instruction.generator))
            else:
                self._tell(MembersFinished(instruction.generator, instruction.num_members))
            return
        if not isinstance(instruction, IssueGroup) and len(order.indices) < instruction.num_members:
            self._tell(MembersFinished(instruction.generator, instruction.num_members - len(order.indices)))
        work = GroupWork(order.group_id, order.attempt, order.prompt, order.indices, self._sampling, self._config.seed)
        self._outboxes[instruction.generator].append(msgspec.structs.replace(work, greedy_index=self._greedy_index))

    def _new_group(self, instruction: IssueGroup) -> WorkOrder | None:
        returned = self.buffer.returned_prompt()
        cursor = self.buffer.cursor
        if returned is not None:
            prompt = returned.prompt
        else:
            prompt = self._prompts[cursor]
            cursor += 1
        return self.buffer.issue(
            prompt,
            instruction.generator,
            version=instruction.version,
            group_size=self._config.algorithm.members_per_group,
            now=self._clock.now(),
            cursor=cursor,
            replaces=returned.replaces if returned else None,
        )

    def _place_evaluation(self) -> None:
        evaluation = self.evaluation
        if evaluation is None or self._evaluation_held or not self._has_turn:
            return
        for peer in self._peers.of("generator"):
            if peer.live_version < evaluation.version:
                continue
            while self.admission.members_on(peer.name) < EVALUATION_ROOM * peer.num_slots:
                work = evaluation.next_work(peer.name)
                if work is None:
                    return
                self._outboxes[peer.name].append(work)
                self._tell(MembersStarted(peer.name, len(work.indices)))
