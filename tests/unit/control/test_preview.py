"""What a dry run says about processes and memory."""

from __future__ import annotations

import pytest

from asyncrl.config.load import parse_config
from asyncrl.control.preview import derived
from asyncrl.errors import ConfigError

KL = {"kl": {}, "reference": {"where": "worker"}}


def test_processes_are_those_that_would_be_started(tmp_path):
    assert derived(parse_config({}))["processes"] == "1 controller, 2 generators, 1 reward workers, 1 learner"
    (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20))
    judge = {"name": "judge", "path": str(tmp_path)}
    raw = {"inference": {"reward_models": [judge]}, "reward": {"functions": []}, "learner": {"kind": "external"}}
    assert derived(parse_config(raw))["processes"] == "1 controller, 2 generators, 1 inference workers, learner outside"


def test_an_inference_workers_memory_is_that_of_its_models(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20))
    judge = {"name": "judge", "path": str(tmp_path)}
    shown = derived(parse_config({"inference": {"reward_models": [judge]}, "algorithm": KL}))
    alone = derived(parse_config({"algorithm": KL}))["memory of each inference worker"]
    own_mib = float(alone.split()[0])
    assert own_mib > 0
    assert shown["memory of each inference worker"] == f"{own_mib + 3:.1f} MiB + activations  (judge, reference)"
    assert "memory of each inference worker" not in derived(parse_config({}))


def test_a_reward_model_without_weights_is_found_before_anything_starts(tmp_path):
    judge = {"name": "judge", "path": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"inference\.reward_models\.path .* has no \*\.safetensors"):
        derived(parse_config({"inference": {"reward_models": [judge]}}))
