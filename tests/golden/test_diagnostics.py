"""Off-policy metrics and entropies of published implementations (numbers/README.md)."""

import numpy as np
import pytest
import torch

from asyncrl.algorithms.diagnostics import sequence_figures, token_figures, weight_figures
from asyncrl.algorithms.loss_terms import aggregate
from asyncrl.algorithms.types import Denominators
from asyncrl.models.logprobs import token_logprobs
from tests.golden.cases import assert_close, cases, matrix


def policies(case):
    """Return proximal and behaviour log-probabilities [N] of valid tokens and sequence ids [N]."""
    mask_BT = matrix(case, "mask").bool()
    rows, width = mask_BT.shape
    flat = [matrix(case, f"{name}_logprobs")[mask_BT].numpy() for name in ("proximal", "behaviour")]
    return *flat, np.arange(rows).repeat(width)[mask_BT.reshape(-1).numpy()]


METRIC = {
    "kl": "kl/k1",
    "k3_kl": "kl/mean",
    "chi2_token": "ratio/chi2_token",
    "chi2_seq": "ratio/chi2_sequence",
    "ppl_ratio": "ratio/perplexity",
    "training_ppl": "perplexity/learner",
    "training_log_ppl": "perplexity/learner_log",
    "rollout_ppl": "perplexity/behaviour",
    "rollout_log_ppl": "perplexity/behaviour_log",
    # The peer's difference is rollout's mean log-probability minus training's: the gap of the log perplexities.
    "log_ppl_diff": "perplexity/log_gap_mean",
    "log_ppl_abs_diff": "perplexity/log_gap_abs_mean",
    "log_ppl_diff_max": "perplexity/log_gap_max",
    "log_ppl_diff_min": "perplexity/log_gap_min",
    "mean": "ratio/correction_mean",
    "std": "ratio/correction_std",
    "eff_sample_size": "ratio/correction_ess",
    "ratio_fraction_high": "ratio/high_fraction",
    "ratio_fraction_low": "ratio/low_fraction",
}
"""Our name of each published figure."""


@pytest.mark.parametrize("case", cases("offpolicy_metrics", lambda case: case["name"].startswith("offpolicy")))
def test_off_policy_metrics(case):
    proximal, behaviour, ids = policies(case)
    figures = token_figures(proximal, behaviour) | sequence_figures(proximal, behaviour, ids)
    for name in case["expected"]:
        assert_close(case, name, figures[METRIC[name]])


@pytest.mark.parametrize("case", cases("offpolicy_metrics", lambda case: case["name"].startswith("is-metrics")))
def test_importance_weight_metrics(case):
    proximal, behaviour, ids = policies(case)
    cap, level = float(case["params"]["cap"]), case["params"]["level"]
    rho, products = np.exp(proximal - behaviour), np.exp(np.bincount(ids, proximal - behaviour))
    ratios, raw_weights = (rho, rho) if level == "token" else (products[np.unique(ids)], products[ids])
    figures = weight_figures(raw_weights.clip(max=cap), ratios, cap)
    for name in case["expected"].keys() & METRIC.keys():
        assert_close(case, name, figures[METRIC[name]])


@pytest.mark.parametrize("case", cases("entropy", lambda case: "token_ids" not in case["inputs"]))
def test_entropy(case):
    logits = matrix(case, "logits").requires_grad_()
    flat = logits.reshape(-1, logits.shape[-1])
    ids = torch.zeros(len(flat), dtype=torch.int64)
    _, entropies = token_logprobs(flat, ids, torch.nn.Identity(), temperature=1.0, chunk_tokens=3, entropy_gradient=True)
    entropy = entropies.reshape(logits.shape[:-1])
    mask = matrix(case, "mask") if "mask" in case["inputs"] else torch.ones(entropy.shape)
    assert_close(case, "entropy_per_token", entropy * mask)
    if "loss" in case["expected"]:
        rows, width = mask.shape
        row_ids = torch.arange(rows).repeat_interleave(width)
        counted = Denominators(int(mask.sum()), int(mask.any(dim=1).sum()))
        loss = aggregate(case["params"]["aggregation"], entropy.reshape(-1), mask.reshape(-1).bool(), row_ids, rows, counted)
        loss.backward()
        assert_close(case, "loss", loss)
        assert_close(case, "grad_logits", logits.grad)


@pytest.mark.parametrize("case", cases("entropy", lambda case: "token_ids" in case["inputs"]))
def test_logprobs_of_given_tokens(case):
    logits = matrix(case, "logits")
    flat, ids = logits.reshape(-1, logits.shape[-1]), torch.tensor(case["inputs"]["token_ids"]).reshape(-1)
    temperature = float(case["params"]["temperature"])
    logprobs, _ = token_logprobs(flat, ids, torch.nn.Identity(), temperature=temperature, chunk_tokens=3)
    assert_close(case, "logprobs", logprobs)
