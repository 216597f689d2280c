"""A run whose generators, judges and learner share a device, by turns: real processes, real switches."""

import itertools

import pytest

import asyncrl
from asyncrl.observe.spans import PHASE, SCORE, SWAP, read_spans
from asyncrl.observe.steps import read_memory
from asyncrl.residency.plan import SWAP_FOLDER

HELD_IN = {"rollout": "generator-0", "inference": "inference-0", "train": "learner"}
HELD = {"generator-0": "KV cache", "inference-0": "reference", "learner": "policy"}


async def test_switches_are_recorded_and_no_two_phases_overlap(tiny, judged):
    placement = {"kind": "colocated", "offload_to": "disk"}
    async with asyncrl.Run(tiny(buffer__max_staleness=1, eval__every_steps=2, placement=placement, **judged)) as run:
        reports = [report async for report in run.steps()]
        status = await run.wait()
    assert (status.phase, status.version) == ("stopped", 5), status.reason
    assert max(report.staleness_max for report in reports) <= 1
    for phase in ("train", "inference"):
        assert all(report.metrics[f"placement/{phase}_s"] > 0 for report in reports)
    # At version 0 the learner is the reference, so what the worker says of it must be the learner's own.
    assert reports[0].metrics["kl/reference_mean"] == pytest.approx(0.0, abs=1e-8)
    assert reports[-1].metrics["kl/reference_mean"] > 0
    spans = list(read_spans(run.run_folder))
    phases = sorted((s for s in spans if s.name == PHASE and s.process == "controller"), key=lambda span: span.start_s)
    assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(phases))
    swaps = [span for span in spans if span.name == SWAP]
    scored = [span for span in spans if span.name == SCORE and span.process == "inference-0"]
    assert swaps
    assert scored
    for phase in phases:
        if phase.attributes["phase"] == "train":
            assert not any(phase.start_s < swap.end_s < phase.end_s for swap in swaps), "weights were taken in a training phase"
        if phase.attributes["phase"] in {"rollout", "train"}:
            assert not any(span.start_s < phase.end_s and phase.start_s < span.end_s for span in scored)
    lines = read_memory(run.run_folder)
    assert {line.process for line in lines} == set(HELD)
    for line in lines:
        assert (line.resident.get(HELD[line.process], 0) > 0) == (HELD_IN[line.phase] == line.process), line
        if line.process == "inference-0":
            assert set(line.resident) == ({"reference", "reward taste"} if line.phase == "inference" else set()), line
    moves = {(line.phase, move.before, move.after) for line in lines if line.process == "learner" for move in line.moves}
    assert moves == {("rollout", "device", "disk"), ("train", "disk", "device")}
    assert not (run.run_folder / SWAP_FOLDER).exists()  # of no use to anybody, and as large as the learner
