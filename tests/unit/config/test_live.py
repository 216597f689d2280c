"""What can be changed while a run goes on."""

import msgspec
import pytest

from asyncrl.buffer.ledger.records import StepParams
from asyncrl.config.live import OF_CONTROLLER, OF_STEPS, changed, settings_of, value_at, with_settings
from asyncrl.config.load import load_config, parse_config
from asyncrl.errors import ConfigError

CONFIG = parse_config({"algorithm": {"kl": {"coefficient": 0.01}}})


@pytest.mark.parametrize("field", [*OF_STEPS, *OF_CONTROLLER])
def test_every_field_that_can_change_is_one_of_the_config(field):
    new, changes = changed(CONFIG, {field: value_at(CONFIG, field) or 2})
    assert value_at(new, field) == (value_at(CONFIG, field) or 2)
    assert len(changes) == (not value_at(CONFIG, field))


def test_settings_of_a_step_make_its_config_from_any_later_one():
    later, _ = changed(CONFIG, {"learner.learning_rate": 1e-3, "num_steps": 7, "algorithm.dual_clip": 4.0})
    assert with_settings(later, settings_of(CONFIG)) == CONFIG
    assert with_settings(CONFIG, settings_of(later)) == later
    assert with_settings(later, settings_of(later)) is later


def test_a_limit_that_was_switched_off_is_off_again_from_the_ledger():
    off = parse_config({"algorithm": {"clip_high": float("inf"), "max_ratio": float("inf")}})
    later, _ = changed(off, {"algorithm.clip_high": 0.2, "algorithm.max_ratio": 2.0, "num_steps": 7})
    stored = msgspec.json.encode(StepParams(0, 4096, 1.0, settings=settings_of(off)))
    assert with_settings(later, msgspec.json.decode(stored, type=StepParams).settings) == off


@pytest.mark.parametrize("algorithm", [{}, {"loss": "reinforce", "corrections": []}, {"kl": {}, "kind": "auto"}])
def test_settings_that_the_config_of_a_resumed_run_cannot_have_are_not_applied(algorithm):
    resumed, settings = parse_config({"algorithm": algorithm}), settings_of(CONFIG) | {"algorithm.dual_clip": 4.0, "num_steps": 7}
    made = with_settings(resumed, settings)
    assert made.num_steps == 7
    assert value_at(made, "algorithm.kl.coefficient") == (0.01 if "kl" in algorithm else None)
    assert made.algorithm.dual_clip == (None if "loss" in algorithm else 4.0)


@pytest.mark.parametrize(("settings", "values", "said"), [
    ({}, {"learner.optimizer": "adamw", "algorithm.group_size": 2}, "algorithm.group_size cannot change .*: fork it, or"),
    ({}, {"learner.learning_rate": -1}, "learning_rate"),
    ({}, {"observe.alarms.no_such": "off"}, "alarms"),
    ({}, {"observe.alarms.reward.dead.deeper": "off"}, "alarms"),
    ({}, {"": 1}, "cannot change"),
    ({}, {"algorithm.kl.coefficient": 0.1}, "no reference is loaded"),
    ({"generate": {"engine": {"kind": "vllm", "max_sequence_tokens": 512}}}, {"generate.sampling.temperature": 0.005}, "vLLM"),
    ({"learner": {"kind": "driven"}}, {"max_run_s": 9, "buffer.max_staleness": 1}, "^buffer.max_staleness cannot change here"),
    ({"learner": {"kind": "external"}}, {"num_steps": 9, "learner.max_grad_norm": 2}, "^learner.max_grad_norm .*'external'"),
    ({"learner": {"kind": "external"}}, {"generate.sampling.temperature": 0.5}, "^generate.sampling.temperature .*'external'"),
    ({"algorithm": {"kl": {"target": 0.1}}}, {"algorithm.kl.coefficient": 0.1}, "adapts it"),
    ({"placement": {"kind": "colocated"}, "buffer": {"max_staleness": 1}}, {"generate.num_workers": 3}, "num_workers"),
])  # fmt: skip
def test_what_cannot_change_or_is_not_allowed_is_refused(settings, values, said):
    with pytest.raises(ConfigError, match=said):
        changed(parse_config(settings), values)


def test_an_alarm_is_switched_by_its_name():
    new, _ = changed(CONFIG, {"observe.alarms.reward.dead": "off"})
    assert new.observe.alarms == {"reward.dead": "off"}
    assert load_config("quickstart", ["observe.alarms.reward.dead=stop"]).observe.alarms == {"reward.dead": "stop"}
