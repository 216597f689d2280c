"""What a dry run says about processes and memory."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncrl.config.load import parse_config
from asyncrl.control.tools.dry_run import derived
from asyncrl.errors import ConfigError

KL = {"kl": {}, "reference": {"where": "worker"}}
ELEMENTS = 3 << 18
"""3 MiB in float32."""


@pytest.fixture
def folder(tmp_path):
    """A model's folder, stored in float16."""
    half = np.zeros(ELEMENTS // 2, np.float16)
    save_file({"a": half.reshape(-1, 2), "b": half}, tmp_path / "m.safetensors")
    return str(tmp_path)


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
