"""Off-policy metrics and entropies of published implementations (numbers/README.md)."""

import pytest
import torch

from asyncrl.algorithms.diagnostics import sequence_mismatch, token_mismatch, weight_figures
from asyncrl.algorithms.loss_terms import aggregate
from asyncrl.algorithms.types import Denominators, segment_sum
from asyncrl.models.logprobs import token_logprobs
from tests.golden.cases import assert_close, cases, matrix


def policies(case):
    """Return proximal and behaviour log-probabilities [N] of valid tokens, sequence ids [N] and the number of rows."""
    mask_BT = matrix(case, "mask").bool()
    rows, width = mask_BT.shape
    flat = [matrix(case, f"{name}_logprobs")[mask_BT] for name in ("proximal", "behaviour")]
    return *flat, torch.arange(rows).repeat_interleave(width)[mask_BT.reshape(-1)], rows


@pytest.mark.parametrize("case", cases("offpolicy_metrics", lambda case: case["name"].startswith("offpolicy")))
def test_off_policy_metrics(case):
    proximal, behaviour, ids, rows = policies(case)
    tokens, sequences = token_mismatch(proximal, behaviour), sequence_mismatch(proximal, behaviour, ids, rows)
    by_name = {
        "kl": tokens.kl_k1,
        "k3_kl": tokens.kl_k3,
        "chi2_token": tokens.chi2,
        "chi2_seq": sequences.chi2,
        "ppl_ratio": sequences.perplexity_ratio,
        "training_ppl": sequences.learner_perplexity,
        "training_log_ppl": sequences.learner_log_perplexity,
        "rollout_ppl": sequences.behaviour_perplexity,
        "rollout_log_ppl": sequences.behaviour_log_perplexity,
        # The peer's difference is rollout's mean log-probability minus training's: the gap of the log perplexities.
        "log_ppl_diff": sequences.log_perplexity_gap,
        "log_ppl_abs_diff": sequences.log_perplexity_gap_abs,
        "log_ppl_diff_max": sequences.log_perplexity_gap_max,
        "log_ppl_diff_min": sequences.log_perplexity_gap_min,
    }
    for name in case["expected"]:
        assert_close(case, name, by_name[name])


@pytest.mark.parametrize("case", cases("offpolicy_metrics", lambda case: case["name"].startswith("is-metrics")))
def test_importance_weight_metrics(case):
    proximal, behaviour, ids, rows = policies(case)
    cap, level = float(case["params"]["cap"]), case["params"]["level"]
    rho, products = (proximal - behaviour).exp(), segment_sum(proximal - behaviour, ids, rows).exp()
    ratios, raw_weights = (rho, rho) if level == "token" else (products[ids.unique()], products[ids])
    weights = raw_weights.clamp(max=cap)
    figures = weight_figures(weights, ratios, cap, level)
    by_name = {
        "mean": figures.mean,
        "std": figures.std,
        "eff_sample_size": figures.ess,
        "ratio_fraction_high": figures.high_fraction,
        "ratio_fraction_low": figures.low_fraction,
        "max": figures.max,
        "min": figures.min,
    }
    for name in case["expected"]:
        assert_close(case, name, by_name[name])


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
