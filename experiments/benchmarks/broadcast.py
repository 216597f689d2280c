"""`asyncrl bench broadcast`: from publish to live in other processes, over every medium, beside what else moves the same bytes.

135M parameters in bfloat16, shaped like SmolLM2-135M (269 MB), held by this process (the learner). A subscriber is a process that
does what a generator does: fetch, compare fingerprints, copy every tensor into the weights it already holds. `live_ms` runs from
the call of `publish` until the last of 1, 2 or 4 of them said so here. Beside the media: bare pyzmq (nothing
verified or loaded).

The bare copy is torch's `copy_` of the same number of bytes between two warm buffers, with all cores; one is made in every
round, and a ratio is the median of the rounds' ratios. The processes have the environment that a run gives its own
(`child_environment`), with as many threads as there are cores.

- `shm_vs_two_copies`: bytes a second over shared memory, live, over those of two bare copies.
- `zeromq_vs_bare`: bytes a second fetched and verified over the `zeromq` medium, over those of bare pyzmq in turns with it.
- `learner_blocked_copies`: bare copies for which `publish` held the learner up.
- `delta_bytes`: bytes of the delta of one RL step over those of the whole. Real `train_step`s (decoupled PPO, AdamW, float32
  masters, learning rate 1e-6) on a few short samples with random rewards; after each, the weights as they would be sent, in
  bfloat16, are encoded against those before, applied, and compared bit for bit. The model is the pretrained SmolLM2-135M where
  `models/SmolLM2-135M-Instruct` is there, else one of its shape with random weights.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.broadcast import BroadcastConfig, FilesMedium, GlooMedium, SharedMemoryMedium, ZeroMQMedium
from asyncrl.control.launch.processes import ProcessSpec, child_environment
from asyncrl.errors import ConfigError
from asyncrl.learner.model.policy import publishable_tensors
from asyncrl.learner.step.train_step import train_step
from asyncrl.models.layout import copy_out, make_manifest, view_tensors
from asyncrl.packing.pack import pack_step
from asyncrl.plan.validate import train_state
from asyncrl.transport.security import make_keys
from asyncrl.weights.delta import apply_delta, encode_delta
from benchmarks.harness import BenchResult, in_process, medians, ratio, seconds_of
from benchmarks.subscribers import Subscribers, bare_zeromq, medium
from benchmarks.workload import PRETRAINED, random_groups, smollm2_model, train_config

AT_LEAST = {"shm_vs_two_copies": 0.8, "zeromq_vs_bare": 0.7}
AT_MOST = {"learner_blocked_copies": 1.5, "delta_bytes": 0.03}
DEFAULT_ROUNDS, NUM_TRAIN_STEPS = 5, 4
LEARNING_RATE, VOCABULARY, PROMPT_TOKENS = 1e-6, 40_000, 16
LENGTHS = np.full((2, 2), 16)
"""Two groups of two responses."""
COUNTS = (1, 2, 4)
MEDIA: dict[str, BroadcastConfig] = {
    "shared_memory": BroadcastConfig(medium=SharedMemoryMedium()),
    "zeromq": BroadcastConfig(medium=ZeroMQMedium()),
    "zeromq_curve": BroadcastConfig(medium=ZeroMQMedium()),
    "gloo": BroadcastConfig(medium=GlooMedium()),
    "files": BroadcastConfig(medium=FilesMedium()),
}
"""What `--media` can name. The second over ZeroMQ is that of a run that has keys."""


def run(rounds: int = 0, media: str = "all") -> BenchResult:
    """Measure in a process with a run's environment, and return medians.

    Args:
        rounds: Measured rounds for one subscriber, after one that warms up; 0: 5. For two and four it is half as many.
        media: `all`, or names of MEDIA with commas between.

    Raises:
        ConfigError: A name is unknown.
    """
    names, spec = chosen(media), ProcessSpec("bench", "learner", 1, (), Path(os.devnull), os.cpu_count() or 1)
    os.environ |= child_environment(os.environ, spec)
    return in_process(measure, rounds or DEFAULT_ROUNDS, names)


def chosen(media: str) -> list[str]:
    """Return the names that `media` asks for. Raises ConfigError for an unknown one."""
    names = list(MEDIA) if media == "all" else [name.strip() for name in media.split(",")]
    if unknown := [name for name in names if name not in MEDIA]:
        raise ConfigError(f"no medium {unknown[0]!r} to measure; there are all, {', '.join(MEDIA)}")
    return names


def measure(rounds: int, names: list[str]) -> BenchResult:
    """Measure here; `run` says what."""
    weights = {name: tensor.detach() for name, tensor in smollm2_model(torch.bfloat16).named_parameters()}
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    figures = {"model_bytes": float(num_bytes), "rounds": float(rounds)}
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    copies_ms: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as folder,
        contextlib.closing(Subscribers(max(COUNTS))) as peers,
        bare_zeromq(num_bytes, peers) as bare,
    ):
        for name, count in itertools.product(names, COUNTS):
            sys.stderr.write(f"measuring {name} with {count}\n")
            run_folder, measured = Path(folder, f"{name}-{count}"), []
            run_folder.mkdir()
            if name.endswith("_curve"):
                make_keys(run_folder)
            with medium(MEDIA[name], run_folder, weights, peers, count) as hand_over:
                # Mappings, buffers and connections are made in the first, which is not counted.
                for _ in range(1 + (rounds if count == 1 else -(-rounds // 2))):
                    copies_ms.append(seconds_of(partial(target.copy_, source)) * 1e3)
                    measured.append(
                        _one_round(name, count, hand_over(), copies_ms[-1], bare() if name == "zeromq" and count == 1 else 0.0)
                    )
            figures |= medians(measured[1:])
    figures["copy_ms"] = statistics.median(copies_ms)
    if "shared_memory" in names:
        figures |= delta_costs(NUM_TRAIN_STEPS)
    ratios = {name: ratio(figures.pop(name), goal) for name, goal in AT_LEAST.items() if name in figures}
    ratios |= {name: ratio(figures.pop(name), goal, at_least=False) for name, goal in AT_MOST.items() if name in figures}
    return BenchResult("broadcast", figures, ratios)


def _one_round(name: str, count: int, told: dict[str, float], copy_ms: float, bare_ms: float) -> dict[str, float]:
    """Return the figures of one hand-over; with one subscriber all of them, and its ratios."""
    if count > 1:
        return {f"{name}_{count}_live_ms": told["live_ms"]}
    figures = {f"{name}_{figure}": value for figure, value in told.items()}
    if name == "shared_memory":
        figures["shm_vs_two_copies"] = 2 * copy_ms / told["live_ms"]
        figures["learner_blocked_copies"] = told["blocked_ms"] / copy_ms
    if name == "zeromq":
        figures |= {"bare_zeromq_live_ms": bare_ms, "zeromq_vs_bare": bare_ms / told["fetch_ms"]}
    return figures


def delta_costs(num_steps: int) -> dict[str, float]:
    """Train and return what a step changed, after a first one, where AdamW moves every element by the learning rate.

    `delta_bytes`: bytes of the delta over those of the whole. `delta_changed_share`: elements that changed. Medians.
    `delta_identical`: 1 where the deltas, applied to one buffer one after the other, always gave the very bytes of the version.
    """
    config, is_there = train_config(LEARNING_RATE), (PRETRAINED / "config.json").is_file()
    pretrained = partial(AutoModelForCausalLM.from_pretrained, PRETRAINED, dtype=torch.float32, local_files_only=True)
    trainee = train_state(pretrained() if is_there else smollm2_model(), config)
    sent = publishable_tensors(trainee.model)
    manifest = make_manifest(sent, "bfloat16")
    before, after, received = (torch.zeros(manifest.total_bytes, dtype=torch.uint8) for _ in range(3))
    copy_out(sent, view_tensors(before, manifest))
    received.copy_(before)
    steps: list[dict[str, float]] = []
    for step in range(num_steps + 1):
        groups = random_groups(PROMPT_TOKENS, LENGTHS, VOCABULARY, step)
        train_step(trainee, pack_step(step, groups, tokens_per_row=256, temperature=1.0), config)
        copy_out(publishable_tensors(trainee.model), view_tensors(after, manifest))
        blob = encode_delta(manifest, before.numpy().data, after.numpy().data)
        assert blob is not None
        apply_delta(manifest, blob, received.numpy().data)
        changed = int((before.view(torch.int16) != after.view(torch.int16)).sum()) / (manifest.total_bytes // 2)
        shares = {"delta_bytes": len(blob) / manifest.total_bytes, "delta_changed_share": changed}
        steps.append(shares | {"delta_identical": float(torch.equal(received, after))})
        before, after = after, before
    identical = min(step["delta_identical"] for step in steps)
    return {"delta_pretrained": float(is_there), **medians(steps[1:]), "delta_identical": identical}
