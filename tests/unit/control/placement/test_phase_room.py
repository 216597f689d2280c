"""Phases that cannot fit are refused before anything starts, and the sum has everything that a phase needs."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification

from asyncrl.config.load import parse_config
from asyncrl.control.placement.gpu_share import check_phase_room
from asyncrl.errors import ConfigError

GIB = 1 << 30
MODEL = {"kind": "scratch", "hidden_size": 512, "num_layers": 2, "num_heads": 8}
D, F, V = 512, 2048, 64
PARAMETERS = 2 * (4 * D * D + 3 * D * F + 2 * D) + D + V * D


def sums(kind: str = "colocated", **settings: Any) -> dict[str, dict[str, float]]:
    """Return the refused phases of a run with hardly any device, each with its lines in GiB."""
    with pytest.raises(ConfigError) as refused:
        check_phase_room(config(kind, 1e-6, **settings))
    phases = re.split(r"placement: phase '(\w+)' does not fit the device:\n", str(refused.value))[1:]
    return {
        phase: {name: float(size) for name, size in re.findall(r"^  (\S.*?) {2,}([\d.]+) GiB$", said, re.MULTILINE)}
        for phase, said in zip(phases[::2], phases[1::2], strict=True)
    }


def config(kind: str, gib: float, **settings: Any) -> Any:
    medium = {"broadcast": {"medium": {"kind": "shared_storage"}}} if kind == "hybrid" else {}
    return parse_config({
        "model": MODEL, "placement": {"kind": kind, "device_memory_gib": gib}, "buffer": {"max_staleness": 1}, **medium,
        **settings,
    })  # fmt: skip


@pytest.fixture
def judge(tmp_path: Path) -> dict[str, Any]:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1, pad_token_id=0)).save_pretrained(tmp_path)
    return {"reward_models": [{"name": "taste", "path": str(tmp_path)}]}


def test_training_counts_weights_state_gradients_activations_and_logits() -> None:
    train = sums(packing={"tokens_per_row": 1024})["train"]
    weights = PARAMETERS * 4 / GIB
    assert train["policy"] == pytest.approx(weights, abs=1e-4)
    assert train["policy optimizer"] == pytest.approx(2 * weights, abs=1e-4)
    assert train["gradients"] == pytest.approx(weights, abs=1e-4)
    # Two layers of two norms (12 bytes), attention's five and the feed-forward's four widths; the last norm, the hidden states.
    per_token = 2 * (2 * 12 * D + 4 * (5 * D + 4 * F)) + 12 * D + 4 * D
    assert train["activations"] == pytest.approx(1024 * per_token / GIB, abs=1e-4)
    assert train["sum"] == pytest.approx(sum(list(train.values())[: list(train).index("sum")]), abs=5e-4)


def test_a_rollout_counts_the_kv_cache_of_every_generator() -> None:
    engine = {"kind": "transformers", "num_slots": 8, "max_sequence_tokens": 512}
    rollout = sums(generate={"num_workers": 2, "engine": engine})["rollout"]
    assert rollout["KV cache"] == pytest.approx(2 * 2 * 2 * D * 512 * 8 * 4 / GIB, abs=1e-4)
    elastic = {"kind": "local", "elastic": {"min_generators": 1, "max_generators": 6}}
    most = sums(generate={"num_workers": 2, "engine": engine}, launch=elastic)["rollout"]
    assert most["KV cache"] == pytest.approx(3 * rollout["KV cache"], abs=3e-4)
    assert "policy" in sums("hybrid", generate={"num_workers": 2, "engine": engine})["rollout"]


def test_inference_workers_on_the_device_are_counted_and_those_elsewhere_are_not(judge: dict[str, Any]) -> None:
    inference = sums(inference={**judge, "num_workers": 2}, algorithm={"kl": {}, "reference": {"where": "worker"}})["inference"]
    assert inference["reference"] == pytest.approx(2 * PARAMETERS * 4 / GIB, abs=1e-4)
    assert inference["reward taste"] > 0
    assert inference["activations of a batch"] > 0
    assert "inference" not in sums(inference={**judge, "device": "cuda"})


def test_a_learners_own_budget_is_held_to_the_same_sum_of_training() -> None:
    alone, shared = sums("disaggregated"), sums("colocated")
    assert set(alone) == {"train"}
    assert alone["train"] == shared["train"]
    check_phase_room(config("disaggregated", alone["train"]["sum"] + 1e-4))
    check_phase_room(config("disaggregated", 1e-6, learner={"kind": "external"}))
