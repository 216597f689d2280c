"""A step's figures: by hand on small records. That ranks change none is shown in tests/integration/ranks/test_rank_cases.py."""

import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.diagnostics import sequence_figures, token_figures
from asyncrl.algorithms.types import Denominators, LossInputs, LossOutputs
from asyncrl.config.algorithm import StalenessMask, TruncatedSequence, TruncatedToken
from asyncrl.learner.metrics import StepTokens

LEARNER_VERSION = 12


def samples(seed=0, count=9):
    """Draw samples of random lengths: everything that a record holds, by sample; NaN at masked tokens."""
    random, drawn = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        tokens = int(torch.randint(1, 12, (1,), generator=random))
        noise = torch.randn(5, tokens, generator=random)
        noise = noise.where(torch.rand(tokens, generator=random) < 0.8, math.nan)
        behaviour = -1.5 + 0.7 * noise[0]
        proximal = behaviour + 0.3 * noise[1]
        mask = ~noise[0].isnan()
        versions = LEARNER_VERSION - torch.randint(0, 12, (tokens,), generator=random).sort(descending=True).values
        drawn.append({
            "behaviour_logprobs": behaviour,
            "proximal_logprobs": proximal,
            "logprobs": proximal + 0.1 * noise[2],
            "reference_logprobs": behaviour + 0.3 * noise[3],
            "entropy": noise[4].abs(),
            "versions": versions.where(mask, 0),
            "mask": mask,
            "clipped": torch.rand(tokens, generator=random) < 0.3,
            "kept": torch.rand(tokens, generator=random) < 0.7,
        })
    return drawn


def add(tokens, members, *, first_update=True):
    """Add samples laid end to end as one row."""

    def joined(name):
        return torch.cat([member[name] for member in members])

    ids = torch.arange(len(members)).repeat_interleave(torch.tensor([len(member["mask"]) for member in members]))
    names = ("proximal_logprobs", "behaviour_logprobs", "entropy", "reference_logprobs", "versions", "mask")
    inputs = LossInputs(
        logprobs=joined("logprobs").requires_grad_(), advantages=torch.zeros(len(ids)), sequence_ids=ids,
        num_sequences=len(members), denominators=Denominators(1, 1), learner_version=LEARNER_VERSION,
        **{name: joined(name) for name in names},
    )  # fmt: skip
    weights = (inputs.proximal_logprobs - inputs.behaviour_logprobs).exp().clamp(max=2.0)
    clipped, kept = (joined(name) & inputs.mask for name in ("clipped", "kept"))
    reference_kl = inputs.logprobs.detach() - inputs.reference_logprobs
    outputs = LossOutputs(torch.zeros(()), weights, clipped, torch.zeros_like(clipped), kept, reference_kl)
    tokens.add(inputs, outputs, proximal_is_learner=True, is_first_update=first_update)


TOKEN_CAP = (TruncatedToken(),)


def figures(rows, corrections=TOKEN_CAP):
    tokens = StepTokens(len(rows), corrections=corrections)
    for row in rows:
        add(tokens, row)
    return tokens.metrics()


def trained(drawn, name):
    return torch.cat([member[name][member["mask"]] for member in drawn]).double().numpy()


def test_figures_are_those_of_the_trained_tokens():
    drawn = samples()
    got = figures([drawn[:4], drawn[4:]])
    proximal, behaviour, current = (trained(drawn, f"{name}logprobs") for name in ("proximal_", "behaviour_", ""))
    reference, ratios = trained(drawn, "reference_logprobs"), np.exp(proximal - behaviour)
    expected, log_rho = token_figures(proximal, behaviour), reference - proximal
    expected = {
        "kl/mean": expected["kl/mean"], "kl/proximal_k3": expected["kl/mean"], "ratio/ess": expected["ratio/ess"],
        "kl/current_k1": (behaviour - current).mean(), "kl/reference_k1": -log_rho.mean(),
        "kl/reference_mean": (np.exp(log_rho) - log_rho - 1).mean(), "kl/penalty_mean": (current - reference).mean(),
        "ratio/p95": np.quantile(ratios, 0.95), "ratio/capped_fraction": (ratios >= 2.0).mean(),
        "ratio/correction_mean": ratios.clip(max=2.0).mean(), "policy/kept_fraction": trained(drawn, "kept").mean(),
        "policy/clip_fraction": trained(drawn, "clipped").mean(), "policy/entropy": trained(drawn, "entropy").mean(),
    }  # fmt: skip
    assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_staleness_buckets_hold_their_tokens_and_only_them_and_mismatch_is_of_gap_zero_alone():
    drawn = samples(count=30)
    got = figures([drawn])
    staleness = LEARNER_VERSION - trained(drawn, "versions")
    proximal, behaviour = trained(drawn, "proximal_logprobs"), trained(drawn, "behaviour_logprobs")
    bounds = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9+": (9, 99)}
    for bucket, (low, high) in bounds.items():
        chosen = (staleness >= low) & (staleness <= high)
        expected = token_figures(proximal[chosen], behaviour[chosen])
        names = {"ratio/ess": "ratio/ess", "kl/proximal_k3": "kl/mean", "ratio/p50": "ratio/p50"}
        assert {name: got[f"{name}_by_staleness/{bucket}"] for name in names} == pytest.approx({
            name: expected[other] for name, other in names.items()
        })
        assert got[f"policy/kept_fraction_by_staleness/{bucket}"] == pytest.approx(trained(drawn, "kept")[chosen].mean())
    fresh = staleness == 0
    assert got["mismatch/tokens"] == fresh.sum()
    assert got["mismatch/kl_k3"] == pytest.approx(token_figures(proximal[fresh], behaviour[fresh])["kl/mean"])
    assert got["mismatch/logprob_gap_max"] == pytest.approx(abs(proximal - behaviour)[fresh].max())


def test_later_passes_count_for_clipping_and_not_for_the_policy_before_the_step():
    drawn = samples()
    moved = [one | {"logprobs": one["logprobs"] + 1.0, "clipped": torch.ones_like(one["mask"])} for one in drawn]
    tokens = StepTokens(1)
    add(tokens, drawn)
    add(tokens, moved, first_update=False)
    got, before = tokens.metrics(), figures([drawn], corrections=())
    assert got["policy/clip_fraction"] == pytest.approx((before["policy/clip_fraction"] + 1) / 2)
    assert got["kl/current_k1"] == pytest.approx(before["kl/current_k1"] - 0.5)
    assert got["kl/mean"] == before["kl/mean"]


def test_sequences_go_by_their_oldest_trained_token():
    drawn = [member for member in samples(count=30) if member["mask"].any()]
    got = figures([drawn])
    for bucket, ages in {"5-8": range(5, 9), "9+": range(9, 99)}.items():
        old = [member for member in drawn if LEARNER_VERSION - int(member["versions"][member["mask"]].min()) in ages]
        ids = np.arange(len(old)).repeat([int(member["mask"].sum()) for member in old])
        expected = sequence_figures(trained(old, "proximal_logprobs"), trained(old, "behaviour_logprobs"), ids)
        assert got[f"ratio/chi2_sequence_by_staleness/{bucket}"] == pytest.approx(expected["ratio/chi2_sequence"])


def test_sequence_truncation_counts_whole_sequences():
    drawn = [member for member in samples(count=20) if member["mask"].any()]
    got = figures([drawn], corrections=(StalenessMask(), TruncatedSequence(cap=1.5)))
    logs = [trained([member], "proximal_logprobs") - trained([member], "behaviour_logprobs") for member in drawn]
    high, lengths = np.array([math.exp(of_sample.sum()) > 1.5 for of_sample in logs]), np.array(list(map(len, logs)))
    assert got["ratio/high_fraction"] == pytest.approx(high.mean())
    assert got["ratio/capped_fraction"] == pytest.approx((high * lengths).sum() / sum(lengths))
