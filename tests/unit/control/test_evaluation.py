"""What counts as right on held-out prompts."""

import msgspec
import pytest

from asyncrl.config.load import parse_config
from asyncrl.control.evaluation import Evaluation
from asyncrl.observe.steps import EvalReport, read_evals
from asyncrl.schema.samples import Prompt, Score
from tests.builders import make_sample, write_jsonl

MODEL = {"inference": {"reward_models": [{"name": "taste", "path": "m"}]}}
LONG = {"kind": "overlong", "max_tokens": 64, "buffer_tokens": 16}


def report_of(verdicts, functions=None, **changes):
    rewards = {} if functions is None else {"reward": {"functions": functions}}
    evaluation = Evaluation(parse_config({**rewards, **changes}), [Prompt(f"h{i}") for i in range(len(verdicts))], 3, 0.0)
    for number, (reward, parts) in enumerate(verdicts):
        evaluation.take_scores(-1 - number, [Score(0, reward, parts)])
    assert evaluation.done
    return evaluation.report(1.0)


def test_a_right_answer_counts_though_it_is_punished_and_a_model_dislikes_it():
    functions = [{"kind": "answer_match", "name": "right"}, LONG]
    verdicts = [(-2.5, {"right": 1.0, "overlong": -0.5, "taste": -3.0}), (4.0, {"right": 0.0, "overlong": 0.0, "taste": 4.0})]
    report = report_of(verdicts, functions, **MODEL)
    assert (report.headline, report.reward_mean) == (("accuracy", 0.5), 0.75)
    functions = [{"kind": "answer_match"}, {"kind": "python", "path": "rewards:rude", "weight": -0.5}]
    assert report_of([(0.5, {"answer_match": 1.0, "python": 1.0})], functions).accuracy == 1.0


@pytest.mark.parametrize("functions", [[], [LONG]])
def test_without_a_rule_that_judges_there_is_a_reward_and_no_accuracy(functions):
    report = report_of([(2.0, {"taste": 2.0}), (4.0, {"taste": 4.0})], functions, **MODEL)
    assert (report.accuracy, report.reward_mean) == (None, 3.0)
    assert report.headline == ("reward", 3.0)


def test_what_fails_at_a_joined_generator_goes_to_one_of_the_run_s_own():
    evaluation = Evaluation(parse_config({"eval": {"samples_per_prompt": 2}}), [Prompt("a"), Prompt("b")], 0, 0.0)
    guest, own = "joined-x-1-0", "generator-0"
    first, second = evaluation.next_work(guest), evaluation.next_work(guest)
    evaluation.take_failure(first.group_id, 0, guest)
    assert evaluation.next_work(own) is None  # the other member is still at work there
    evaluation.take_scores(first.group_id, [Score(1, 1.0, {"answer_match": 1.0})])
    assert evaluation.next_work(guest) is None
    assert evaluation.next_work(own).indices == (0,)
    assert evaluation.holders == {first.group_id: own, second.group_id: guest}
    evaluation.take_failure(first.group_id, 0, own)
    evaluation.take_failure(second.group_id, 0, guest)
    evaluation.generator_lost(guest)
    assert evaluation.next_work(guest) is None
    assert evaluation.next_work(own).indices == (0, 1)
    for index in (0, 1):
        evaluation.take_scores(second.group_id, [Score(index, 1.0, {"answer_match": 1.0})])
    assert evaluation.done
    report = evaluation.report(1.0)
    assert (report.accuracy, report.num_samples, report.num_failed) == (0.75, 4, 1)


def test_a_member_that_one_of_the_run_s_own_works_on_is_not_handed_out_again_as_another_member_is_scored():
    evaluation = Evaluation(parse_config({"eval": {"samples_per_prompt": 2}}), [Prompt("a")], 0, 0.0)
    guest, group_id = "joined-x-1-0", -1
    assert evaluation.next_work(guest).indices == (0, 1)
    evaluation.take_failure(group_id, 0, guest)
    evaluation.take_samples([make_sample(group_id, 1, [1])])
    evaluation.generator_lost(guest)
    assert evaluation.next_work("generator-0").indices == (0,)
    evaluation.take_scores(group_id, [Score(1, 1.0, {"answer_match": 1.0})])
    assert evaluation.holders == {group_id: "generator-0"}
    assert evaluation.next_work("generator-1") is None
    evaluation.take_scores(group_id, [Score(0, 1.0, {"answer_match": 1.0})])
    assert evaluation.report(1.0).accuracy == 1.0


def test_the_newest_version_that_took_part_is_told_and_rows_of_before_are_read_too(tmp_path):
    evaluation = Evaluation(parse_config({}), [Prompt("a"), Prompt("b")], 3, 0.0)
    assert evaluation.report(1.0).newest_version == -1
    evaluation.take_samples([make_sample(-1, 0, [1, 2], versions=[3, 5]), make_sample(-2, 0, [1], versions=4)])
    assert (evaluation.report(1.0).version, evaluation.report(1.0).newest_version) == (3, 5)
    old = msgspec.to_builtins(evaluation.report(1.0))
    del old["newest_version"], old["num_failed"]
    write_jsonl(tmp_path / "eval.jsonl", [old])
    assert read_evals(tmp_path) == [EvalReport(**old)]
