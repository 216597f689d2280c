"""What `auto` means on this machine, and what a dry run says about processes and memory."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncrl.config.load import parse_config
from asyncrl.control.tools.choices import derived, with_choices
from asyncrl.errors import ConfigError
from asyncrl.models.number_format import hardware_format

KL = {"kl": {}, "reference": {"where": "worker"}}
ELEMENTS = 3 << 18
"""3 MiB in float32."""


@pytest.fixture
def folder(tmp_path):
    """A model's folder, stored in float16."""
    half = np.zeros(ELEMENTS // 2, np.float16)
    save_file({"a": half.reshape(-1, 2), "b": half}, tmp_path / "m.safetensors")
    return str(tmp_path)


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


def shown(**raw):
    return derived(parse_config(raw))


def test_processes_are_those_that_would_be_started(folder):
    assert shown()["processes"] == "1 controller, 2 generators, 1 reward workers, 1 learner"
    judge = {"reward_models": [{"name": "judge", "path": folder}]}
    outside = shown(inference=judge, reward={"functions": []}, learner={"kind": "external"})
    assert outside["processes"] == "1 controller, 2 generators, 1 inference workers, learner outside"
    assert "policy on the learner" not in outside
    assert shown(learner={"ranks": 4})["processes"].endswith("1 learner of 4 ranks")


def test_an_inference_workers_memory_is_that_of_its_models_in_the_dtype_they_are_held_in(folder):
    judge = {"name": "judge", "path": folder}
    alone = float(shown(algorithm=KL)["memory of each inference worker"].split()[0].replace(",", ""))
    assert alone > 0
    both = shown(inference={"reward_models": [judge]}, algorithm=KL)["memory of each inference worker"]
    assert both == f"{alone + 3:.1f} MiB + activations  (judge, reference)"
    halved = shown(inference={"reward_models": [judge | {"dtype": "bfloat16"}]})["memory of each inference worker"]
    assert halved == "1.5 MiB + activations  (judge)"
    assert "memory of each inference worker" not in shown()


def test_a_model_without_weights_is_found_before_anything_starts(tmp_path):
    judge = {"inference": {"reward_models": [{"name": "judge", "path": str(tmp_path)}]}}
    with pytest.raises(ConfigError, match=r"inference\.reward_models\.path .* has no \*\.safetensors"):
        shown(**judge)
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match=r"inference\.reward_models\.path .* cannot be read"):
        shown(**judge)
