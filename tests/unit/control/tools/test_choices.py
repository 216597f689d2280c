"""What `auto` means on this machine, and what a dry run says about processes and memory."""

import pytest

from asyncrl.config.load import parse_config
from asyncrl.control.tools.choices import with_choices
from asyncrl.models.number_format import hardware_format


def chosen(num_workers=1, groups=64, hidden_size=128, **engine):
    engine = {"kind": "transformers", "max_sequence_tokens": 16, "dtype": "float32"} | engine
    return with_choices(parse_config({
        "model": {"kind": "scratch", "hidden_size": hidden_size, "num_layers": 1000},
        "algorithm": {"groups_per_step": groups, "group_size": 4},
        "learner": {"dtype": "auto"},
        "generate": {"num_workers": num_workers, "engine": engine, "sampling": {"max_new_tokens": 4}},
    }))  # fmt: skip


@pytest.mark.parametrize(("num_workers", "groups", "slots"), [(1, 64, 256), (2, 64, 128), (3, 64, 86), (1, 3, 12)])
def test_a_generator_gets_its_part_of_a_steps_samples_as_slots(num_workers, groups, slots):
    config, said = chosen(num_workers, groups)
    assert config.generate.engine.num_slots == slots
    assert any(line.startswith(f"generate.engine.num_slots auto is {slots}: {4 * groups} samples a step") for line in said)


def test_slots_are_fewer_where_their_kv_cache_would_fill_the_memory():
    config, said = chosen(hidden_size=1 << 20)  # 134 GB a sequence
    assert config.generate.engine.num_slots == 1
    assert any("but the KV cache of more would take over 25% of" in line for line in said)


def test_auto_dtypes_are_this_machines_and_what_is_given_stays():
    config, said = chosen(num_slots=7, dtype="auto")
    expected, why = hardware_format("cpu")
    assert (config.learner.dtype, config.generate.engine.dtype) == (expected, expected)
    assert f"learner.dtype auto is {expected}: {why}" in said
    assert config.generate.engine.num_slots == 7
    again, nothing = with_choices(config)
    assert (again, nothing) == (config, [])
