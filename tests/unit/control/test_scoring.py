"""Scores: two halves make a score, whatever dies or comes twice on the way."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.control.peers import Peers
from asyncrl.control.scoring import MOST_LOSSES, ScoreDispatcher
from asyncrl.errors import ConnectionClosed
from asyncrl.schema.samples import InferRequest, InferResult, Prompt, Score, ScoreRequest, Scores, ids_to_bytes, logprobs_to_bytes
from tests.builders import hello, score_of

WINDOW = 2
WEIGHTS = {"judge": 2.0, "style": -0.5}


class FakeConnection:
    """A connection with a window, whose other end is this test."""

    def __init__(self, kind, name):
        self.peer = hello(kind, name)
        self.inbox = []
        self.is_open = True

    def try_send(self, message, lane=None):
        if not self.is_open:
            raise ConnectionClosed("gone")
        if len(self.inbox) >= WINDOW:
            return False
        self.inbox.append(message)
        return True

    def unacknowledged(self, lane=None):
        return len(self.inbox)


def _rules(*members):
    num = len(members := members or (0,))
    return ScoreRequest(1, 0, Prompt("p"), members, ("x",) * num, ("stop",) * num, (1,) * num)


def _models(member=0):
    return InferRequest(1, member, 0, ids_to_bytes([1]), ids_to_bytes([2]))


def _score(*members, reward=1.0, error=""):
    each = [score_of(1, member, reward, {"match": reward}, error=error, worker="reward-0") for member in members or (0,)]
    return msgspec.structs.replace(each[0], scores=tuple(score for one in each for score in one.scores))


def _result(member=0, error=""):
    rewards = {} if error else {"judge": 0.25, "style": 1.0}
    return InferResult(1, member, 0, logprobs_to_bytes([-0.5]), rewards, error, "inference-0", 1.5, 3.0)


def _desk(*requests, kind="inference"):
    """A desk whose one worker was handed these requests."""
    desk, peers = ScoreDispatcher(WEIGHTS), Peers()
    peers.add(FakeConnection(kind, f"{kind}-0"))
    desk.ask(*requests, now=0.0)
    desk.dispatch(peers)
    return desk


def test_models_that_fail_give_no_rewards_and_others_give_theirs_and_no_more():
    desk, told = _desk(_models()), _result()
    for wrong in ({"error": "no memory"}, {"rewards": {"judge": 1.0}}, {"rewards": {"judge": 1.0, "style": 1.0, "other": 1.0}}):
        assert "it judges by" in desk.refusal(msgspec.structs.replace(told, **wrong), "inference-0")
    assert desk.refusal(told, "inference-0") == ""
    assert desk.refusal(_result(error="no memory"), "inference-0") == ""


@pytest.mark.parametrize("order", [1, -1])
def test_a_score_is_complete_when_both_have_answered_in_either_order(order):
    desk = ScoreDispatcher(WEIGHTS)
    desk.ask(_rules(), _models(), now=5.0)
    first, second = [_score(), _result()][::order]
    assert desk.take(first) is None
    scores = desk.take(second)
    parts, logprobs = {"match": 1.0, "judge": 0.25, "style": 1.0}, logprobs_to_bytes([-0.5])
    assert scores.scores == (Score(0, 1.0 + 2.0 * 0.25 - 0.5 * 1.0, parts, "", logprobs),)
    assert (scores.started_s, scores.finished_s, scores.worker) == (1.0, 3.0, "reward-0+inference-0")


def test_an_answer_about_other_members_than_were_asked_for_is_refused():
    desk = _desk(_rules(0, 1), kind="reward")
    for members in ((0,), (0, 1, 2), (1, 0), (2, 0, 1), (0, 1, 1)):
        assert "not those of a request" in desk.refusal(_score(*members), "reward-0")
    assert desk.refusal(_score(0, 1), "reward-0") == ""


@pytest.mark.parametrize(("rules", "models"), [("raised", ""), ("", "too long"), ("raised", "too long"), (None, "too long")])
def test_an_error_of_either_half_fails_the_sample_with_both_reasons(rules, models):
    desk = ScoreDispatcher(WEIGHTS)
    desk.ask(*([] if rules is None else [_rules()]), _models(), now=0.0)
    assert rules is None or desk.take(_score(error=rules)) is None
    (score,) = desk.take(_result(error=models)).scores
    assert score.error == "; ".join(filter(None, [rules, models]))


def test_a_sample_that_kills_inference_workers_is_given_up_and_its_other_half_still_counts():
    desk, peers = ScoreDispatcher(WEIGHTS), Peers()
    desk.ask(_rules(), _models(), now=0.0)
    for _ in range(MOST_LOSSES):
        assert len(desk.open["inference"]) == 1
        peers.add(FakeConnection("inference", "inference-0"))
        desk.dispatch(peers)
        assert desk.worker_lost("inference-0") == []
    assert desk.open["inference"] == {}
    (score,) = desk.take(_score()).scores
    assert "3 workers died while they held this sample, the last was inference-0" in score.error
    assert (score.reward, score.parts) == (1.0, {"match": 1.0})


class DeskMachine(RuleBasedStateMachine):
    """Workers that answer in any order, answer twice, die holding requests, and come back."""

    def __init__(self):
        super().__init__()
        self.desk, self.peers = ScoreDispatcher(WEIGHTS), Peers()
        self.connections, self.asked, self.complete, self.said = {}, {}, [], []
        for name in ("reward-0", "reward-1", "inference-0", "inference-1"):
            self._start(name)

    def _start(self, name):
        self.connections[name] = FakeConnection(name.partition("-")[0], name)
        self.peers.add(self.connections[name])

    @rule(has_rules=st.booleans(), has_models=st.booleans(), num=st.integers(1, 3))
    def ask(self, has_rules, has_models, num):
        members = range(len(self.asked), len(self.asked) + num)
        has_models = has_models or not has_rules
        self.asked |= dict.fromkeys(members, (has_rules, has_models))
        self.desk.ask(*([_rules(*members)] if has_rules else []), *(map(_models, members) if has_models else []), now=0.0)

    @rule()
    def dispatch(self):
        self.desk.dispatch(self.peers)

    @rule(name=st.sampled_from(["reward-0", "reward-1", "inference-0", "inference-1"]), at=st.integers(0, WINDOW - 1))
    def answer(self, name, at):
        inbox = self.connections[name].inbox
        if at < len(inbox):
            asked = inbox.pop(at)
            answer = _score(*asked.indices) if isinstance(asked, ScoreRequest) else _result(asked.index)
            self.said.append(answer)
            self._note(self.desk.take(answer))

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def repeat(self, data):
        assert self.desk.take(data.draw(st.sampled_from(self.said))) is None

    @rule(name=st.sampled_from(["reward-0", "reward-1", "inference-0", "inference-1"]))
    def die(self, name):
        self.peers.remove(self.peers.get(name))
        self.connections[name].is_open = False
        for scores in self.desk.worker_lost(name):
            assert all(f"workers died while they held this sample, the last was {name}" in score.error for score in scores.scores)
            self._note(scores)
        self._start(name)

    def _note(self, scores: Scores | None):
        if scores is not None:
            self.complete += [score.index for score in scores.scores]

    @invariant()
    def every_score_is_open_or_complete_once(self):
        assert len(self.complete) == len(set(self.complete))
        assert len(self.desk) + len(self.complete) == len(self.asked)

    @invariant()
    def open_halves_belong_to_open_scores(self):
        open_members = set(self.asked) - set(self.complete)
        assert len(self.desk.open["reward"]) <= sum(self.asked[member][0] for member in open_members)
        assert len(self.desk.open["inference"]) <= sum(self.asked[member][1] for member in open_members)

    def teardown(self):
        for _ in range(4 * len(self.asked) + 4):
            self.desk.dispatch(self.peers)
            for name in self.connections:
                self.answer(name, 0)
        assert len(self.desk) == 0, "an asked score never became complete"
        assert self.desk.open == {"reward": {}, "inference": {}}


TestDesk = DeskMachine.TestCase
TestDesk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
