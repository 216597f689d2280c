"""What of a run's files becomes a line of results."""

import msgspec
import pytest

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.observe.steps import EvalReport, StepReport
from asyncrl.sweep.grid import Plan
from asyncrl.sweep.results import measure_external, measure_run
from tests.builders import write_rows

PLAN = Plan(name="x", arms=("a",), baseline="a", seeds=(0,), metrics=("accuracy",), bar=0.5, window=2)
CONFIG = load_config("quickstart")


def write_run(folder, ends_s, rewards, evals=((0, 100.0, 0.3),)):
    steps = [
        StepReport(step=step, version=step + 1, time_s=end_s, reward_mean=reward, learner_idle=step / 10, staleness_max=step)
        for step, (end_s, reward) in enumerate(zip(ends_s, rewards, strict=True))
    ]
    told = [EvalReport(version=version, accuracy=share, num_samples=8, finished_s=at_s) for version, at_s, share in evals]
    write_rows(folder / "steps.jsonl", *steps)
    write_rows(folder / "eval.jsonl", *told)
    return folder


def test_a_metric_of_steps_is_the_mean_of_the_last_that_have_it(tmp_path):
    name, steps = "bias/length_ratio", enumerate([{"bias/length_ratio": value} for value in (9.0, 1.0, 2.0)] + [{}])
    made = (StepReport(step=at, version=at + 1, time_s=float(at), reward_mean=0.0, metrics=metrics) for at, metrics in steps)
    write_rows(tmp_path / "steps.jsonl", *made)
    plan = msgspec.structs.replace(PLAN, metrics=("accuracy", name, "bias/reward_gap"))
    assert measure_run(tmp_path, CONFIG, plan, [0.0]).values == {name: 1.5}


def test_the_time_in_which_an_interrupted_run_did_not_run_is_left_out(tmp_path):
    run = write_run(tmp_path, [102.0, 104.0, 1006.0, 1008.0], [0.1, 0.3, 0.7, 0.9])
    for starts_s in ([90.0, 1000.0], [90.0, 1000.0, 1009.0]):  # the last only evaluated
        assert measure_run(run, CONFIG, PLAN, starts_s).train_s == 8.0


def test_a_run_is_measured_from_when_version_0_was_evaluated_and_a_step_whose_line_was_lost_with_its_controller_counts(tmp_path):
    run = write_run(tmp_path, [102.0, 104.0, 106.0, 110.0], [0.1, 0.3, 0.7, 0.9], [(0, 100.0, 0.3), (4, 111.0, 0.8)])
    made = measure_run(run, CONFIG, PLAN, [90.0])
    assert (made.train_s, made.seconds_to_bar, made.samples_to_bar, made.samples) == (10.0, 6.0, 3 * 256.0, 4 * 256)
    assert (made.accuracy_before, made.accuracy, made.reward, made.staleness_max) == (0.3, 0.8, 0.8, 3)
    assert made.evals == ((0.0, 0, 0.3), (10.0, 1024, 0.8))
    assert made.learner_idle == pytest.approx((0 * 2 + 0.1 * 2 + 0.2 * 2 + 0.3 * 4) / 10)
    assert made.curve[-1] == (10.0, 1024, 0.9)
    first, _lost, *rest = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    (run / "steps.jsonl").write_text("".join((first, *rest)))
    made = measure_run(run, CONFIG, PLAN, [90.0])
    assert (made.steps, made.samples, made.accuracy) == (4, 1024, 0.8)
    assert made.evals == ((0.0, 0, 0.3), (10.0, 1024, 0.8))


def test_what_an_external_command_wrote(tmp_path):
    path = tmp_path / "result.json"
    with pytest.raises(ConfigError, match=r"result.json: No such file or directory; .*command.log has the command's output, and"):
        measure_external(path, CONFIG, PLAN)
    path.write_bytes(msgspec.json.encode({"seconds": [1.0, 2.0, 3.0], "rewards": [0.2, 0.6, 0.8], "accuracy": [0.1, 0.7]}))
    made = measure_external(path, CONFIG, PLAN)
    assert (made.seconds_to_bar, made.accuracy_before, made.accuracy, made.samples) == (3.0, 0.1, 0.7, 768)
    wrongs = {
        '{"seconds": [1.0], "rewards": []}': "1 seconds and 0 rewards",
        '{"second": []}': "second",
        "": "truncated",
        '{"seconds": [5.0, 1.0], "rewards": [0, 1]}': "seconds that fall",
        '{"seconds": [-1], "rewards": [0]}': "`float` > 0",
        '{"seconds": [1], "rewards": [1e308]}': r"rewards\[",
        '{"seconds": [1], "rewards": [1], "accuracy": [0, 7.5]}': "<= 1.0",
    }
    for wrong, said in wrongs.items():
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=said):
            measure_external(path, CONFIG, PLAN)
