"""Runs whose generators and learner share a device, by turns: real processes, real switches."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForSequenceClassification

import asyncrl
from asyncrl.config.run import RunConfig
from asyncrl.learner.model.policy import character_tokenizer
from asyncrl.observe.memory import read_memory
from asyncrl.observe.spans import PHASE, SCORE, SWAP, read_spans
from asyncrl.residency.plan import SWAP_FOLDER
from asyncrl.tasks.registry import build_task

pytestmark = pytest.mark.timeout(240)

PLACEMENTS = {
    "disaggregated": {},
    "colocated": {"placement": {"kind": "colocated"}},
    "hybrid": {"placement": {"kind": "hybrid"}, "broadcast": {"medium": {"kind": "shared_storage"}}},
}


async def _weights(config: RunConfig) -> dict[str, torch.Tensor]:
    async with asyncrl.Run(config) as run:
        status = await run.wait()
    assert status.phase == "stopped", status.reason
    return load_file(Path(status.checkpoint) / "model.safetensors")


async def test_synchronous_placements_train_the_very_same_weights(tiny, tmp_path):
    """Evaluation goes on across switches and changes nothing."""
    trained = {
        kind: await _weights(tiny(name=kind, num_steps=4, buffer__max_staleness=0, eval__every_steps=2, **settings))
        for kind, settings in PLACEMENTS.items()
    }
    for kind in ("colocated", "hybrid"):
        for name, tensor in trained["disaggregated"].items():
            assert torch.equal(tensor, trained[kind][name]), f"{kind}: {name} differs"


async def test_ranks_that_take_turns_train_the_very_same_weights(tiny, tmp_path):
    (tmp_path / "my_reward.py").write_text("def mixed(prompt, text):\n    return float(sum(map(ord, text)) % 5)\n")
    rewards = [{"kind": "python", "path": f"{tmp_path / 'my_reward.py'}:mixed"}]
    placements = {"disaggregated": {}, "colocated": {"placement": {"kind": "colocated", "offload_to": "disk"}}}
    trained = {
        kind: await _weights(
            tiny(name=kind, num_steps=4, buffer__max_staleness=0, learner__ranks=2, reward__functions=rewards, **settings)
        )
        for kind, settings in placements.items()
    }
    for name, tensor in trained["disaggregated"].items():
        assert torch.equal(tensor, trained["colocated"][name]), f"{name} differs"
    (colocated,) = tmp_path.rglob("colocated*/memory")
    lines = read_memory(colocated.parent)
    assert {line.process for line in lines} == {"learner", "learner-1", "generator-0"}
    for line in lines:
        if line.process.startswith("learner"):
            assert set(line.resident) == ({"policy", "policy optimizer"} if line.phase == "train" else set()), line


async def test_switches_are_recorded_and_no_two_phases_overlap(tiny):
    placement = {"kind": "colocated", "offload_to": "disk"}
    async with asyncrl.Run(tiny(buffer__max_staleness=1, placement=placement)) as run:
        reports = [report async for report in run.steps()]
        status = await run.wait()
    assert status.version == 5
    assert max(report.staleness_max for report in reports) <= 1
    assert all(report.metrics["placement/train_s"] > 0 for report in reports)
    spans = list(read_spans(run.run_folder))
    generators = [span for span in spans if span.name == PHASE and span.process == "controller"]
    ordered = sorted(generators, key=lambda span: span.start_s)
    assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(ordered))
    training = [(span.start_s, span.end_s) for span in ordered if span.attributes["phase"] == "train"]
    swaps = [span.end_s for span in spans if span.name == SWAP]
    assert swaps
    assert not any(start < swap < end for swap in swaps for start, end in training), "weights were taken in a training phase"
    lines = read_memory(run.run_folder)
    assert {line.process for line in lines} == {"learner", "generator-0"}
    for line in lines:
        held = line.resident.get("KV cache" if line.process.startswith("generator") else "policy", 0)
        mine = "rollout" if line.process.startswith("generator") else "train"
        assert (held > 0) == (line.phase == mine), line
    # What is on disk comes nearer before the learner's turn where there is the time (tests/unit/learner/test_worker.py).
    moves = {(line.phase, move.before, move.after) for line in lines if line.process == "learner" for move in line.moves}
    nearer = {("rollout", "disk", "host"), ("train", "host", "device")}
    assert {("rollout", "device", "disk")} <= moves <= {("rollout", "device", "disk"), ("train", "disk", "device"), *nearer}
    assert moves & {("train", "disk", "device"), ("train", "host", "device")}
    assert not (run.run_folder / SWAP_FOLDER).exists()  # of no use to anybody, and as large as the learner


@pytest.fixture
def judged(tiny, tmp_path):
    """Settings of a run with a reward model and a reference on an inference worker, and steps that need both."""
    alphabet = build_task(tiny().task, 0).alphabet
    torch.manual_seed(0)
    size = len(character_tokenizer(alphabet))
    LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=32, num_labels=1, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        )
    ).save_pretrained(tmp_path / "judge")  # fmt: skip
    return {
        "inference__reward_models": [{"name": "taste", "path": str(tmp_path / "judge"), "weight": 0.1}],
        "algorithm__kl": {"coefficient": 0.01},
        "algorithm__reference": {"where": "worker"},
    }


async def test_models_on_the_shared_device_judge_in_a_phase_of_their_own(tiny, judged):
    config = tiny(buffer__max_staleness=1, eval__every_steps=2, **judged, **PLACEMENTS["hybrid"])
    async with asyncrl.Run(config) as run:
        reports = [report async for report in run.steps()]
        status = await run.wait()
    assert (status.phase, status.version) == ("stopped", 5), status.reason
    assert all(report.metrics["placement/inference_s"] > 0 for report in reports)
    # At version 0 the learner is the reference, so what the worker says of it must be the learner's own.
    assert reports[0].metrics["kl/reference_mean"] == pytest.approx(0.0, abs=1e-8)
    assert reports[-1].metrics["kl/reference_mean"] > 0
    spans = list(read_spans(run.run_folder))
    phases = sorted((s for s in spans if s.name == PHASE and s.process == "controller"), key=lambda span: span.start_s)
    assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(phases))
    others = [(span.start_s, span.end_s) for span in phases if span.attributes["phase"] in {"rollout", "train"}]
    scored = [span for span in spans if span.name == SCORE and span.process == "inference-0"]
    assert scored
    assert not any(start < span.end_s and span.start_s < end for span in scored for start, end in others)
    lines = read_memory(run.run_folder)
    assert {line.process for line in lines} == {"learner", "generator-0", "inference-0"}
    for line in lines:
        if line.process == "inference-0":
            assert set(line.resident) == ({"reference", "reward taste"} if line.phase == "inference" else set()), line
        elif line.process == "learner" and line.phase != "train":
            assert set(line.resident) == {"policy"}, line


async def test_a_judge_that_dies_in_its_turn_loads_again_in_its_turn(tiny, judged, recorded_pids):
    config = tiny(num_steps=12, buffer__max_staleness=0, eval__at_start=False, **judged, **PLACEMENTS["colocated"])
    async with asyncrl.Run(config) as run:
        async for report in run.steps():
            if report.version == 3:
                os.kill(recorded_pids(run.run_folder)["inference-0"], signal.SIGKILL)
        status = await run.wait()
    assert (status.phase, status.version) == ("stopped", 12), status.reason
    assert {process.name: process.deaths for process in status.processes}["inference-0"] == 1
