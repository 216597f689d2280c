"""Numbers of published implementations of losses, corrections, KL and aggregation (numbers/README.md), values and gradients.

A case's name and params choose the options; a variant or an expected output that nothing here knows fails. Advantages,
preferences and diagnostics have files of their own beside this one.
"""

import math
import re
from dataclasses import replace

import msgspec
import pytest
import torch

from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.loss_terms import aggregate, count_denominators, interpolated_proximal, kl_penalty
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.types import Denominators, LossConfig, LossInputs
from asyncrl.config import algorithm as kinds
from tests.golden.cases import assert_close, cases, matrix

EXACT = {"mask", "keep_rows", "clip_count", "dual_clip_count"}


def stem(case):
    """The variant: the name without seed, position and peer."""
    return re.sub(r"-(verl|areal|openrlhf|trl|slime)(-\d+)?(-s\d+)?$", "", case["name"])


def peer(case):
    return case["source"].split()[0]


def check(case, got):
    for name in case["expected"]:
        assert_close(case, name, got[name], "int" if name in EXACT else "")


def flat_inputs(case):
    """The case as one micro-batch; what it does not give is on policy. TRL counts rows without a token, the others do not."""

    def given(*names):
        return next((matrix(case, name) for name in names if name in case["inputs"]), None)

    mask_BT, proximal = matrix(case, "mask").bool(), given("proximal_logprobs", "logprobs")
    rows, width = mask_BT.shape
    advantages, of_rows, reference = given("advantages"), given("row_advantages"), given("ref_logprobs")
    if advantages is None:
        advantages = torch.zeros_like(proximal) if of_rows is None else of_rows.unsqueeze(1).expand(rows, width)
    num_sequences = rows if peer(case) == "trl" else int(mask_BT.any(dim=1).sum())
    return LossInputs(
        logprobs=given("logprobs", "proximal_logprobs").reshape(-1).requires_grad_(),
        proximal_logprobs=proximal.reshape(-1),
        behaviour_logprobs=given("behaviour_logprobs", "proximal_logprobs", "logprobs").reshape(-1),
        advantages=advantages.reshape(-1),
        mask=mask_BT.reshape(-1),
        sequence_ids=torch.arange(rows).repeat_interleave(width),
        num_sequences=rows,
        denominators=Denominators(int(mask_BT.sum()), num_sequences, case["params"].get("constant", 1.0)),
        reference_logprobs=None if reference is None else reference.reshape(-1),
    )


def clip_options(params):
    return {
        "clip_low": params.get("eps_low", 0.2),
        "clip_high": params.get("eps_high", 0.2),
        "dual_clip": params.get("dual_clip"),
        "aggregation": params.get("aggregation", "token-mean"),
    }


def run_loss(name, inputs, config):
    """Loss and gradient, and the counts that peers report with them."""
    outputs = LOSSES[name](inputs, config)
    outputs.loss.backward()
    count = inputs.mask.sum()
    log_rho = (inputs.proximal_logprobs - inputs.behaviour_logprobs)[inputs.mask]
    weights = outputs.weights[inputs.mask]
    return {
        "loss": outputs.loss,
        "grad_logprobs": inputs.logprobs.grad,
        "weights": outputs.weights,
        "clip_count": (outputs.clipped & inputs.mask).sum(),
        "clip_fraction": (outputs.clipped & inputs.mask).sum() / count.double(),
        "dual_clip_count": (outputs.dual_clipped & inputs.mask).sum(),
        "dual_clip_fraction": (outputs.dual_clipped & inputs.mask).sum() / count.double(),
        "approx_kl": (inputs.proximal_logprobs - inputs.logprobs)[inputs.mask].mean(),
        "behaviour_kl_k1": -log_rho.mean(),
        "ess_fraction": weights.sum() ** 2 / (count * weights.square().sum()),
        "weight_mean": weights.mean(),
        "weight_std": weights.std(correction=0),
    }


def policy_loss_of(case):
    """The loss of a case, its corrections and its other options."""
    variant, params = stem(case), case["params"]
    band = {"low": params.get("low", 0.0), "high": params.get("high", math.inf)}
    logs = {name: math.log(bound) for name, bound in band.items() if bound}
    clipped = {"floor": band["low"], "cap": params.get("cap", band["high"]), "normalize": params.get("batch_normalize", False)}
    if variant.startswith(("ppo-clip-", "ppo-dual-clip-")) or variant == "decoupled-no-weight":
        return "ppo_clip", (), {}
    if variant in {"cispo", "sapo", "sapo-token-mean"}:
        names = {"max_ratio": "max_ratio", "tau_pos": "tau_positive", "tau_neg": "tau_negative"}
        options = {names[name]: value for name, value in params.items() if name in names}
        return variant.split("-")[0], (), options | {"min_ratio": 1.0 - params.get("eps_low", 1.0)}
    if variant.startswith("m2po-mask-"):
        return "ppo_clip", (kinds.SecondMomentMask(threshold=params["threshold"]),), {"denominator": "kept"}
    if variant.startswith("opsm-"):
        return "ppo_clip", (kinds.OffPolicySequenceMask(threshold=params["threshold"]),), {}
    corrections = {
        "decoupled-uncapped": (),
        **dict.fromkeys(
            ("decoupled-capped", "decoupled-clip-higher-dual-capped", "decoupled-capped-dual-seqmean", "tis-token",
             "tis-token-two-sided"), (kinds.TruncatedToken(**clipped),),
        ),
        "tis-sequence": (kinds.TruncatedSequence(**clipped),),
        "sequence-mask-geo-gate-token-weight": (kinds.MaskedGeometric(**band, weight="token"),),
        "rejection-seq_sum_k1": (kinds.Rejection(level="sum", measure="k1", **logs),),
        "rejection-seq_mean_k1": (kinds.Rejection(level="mean", measure="k1", **logs),),
        **dict.fromkeys(("icepop-token", "mis-mask-token"), (kinds.MaskedToken(**band),)),
        **dict.fromkeys(("icepop-sequence", "mis-mask-sequence"), (kinds.MaskedSequence(**band, weight="sequence"),)),
        **dict.fromkeys(("sequence-mask-geo", "mis-mask-geometric"), (kinds.MaskedGeometric(**band, weight="geometric"),)),
    }  # fmt: skip
    return "decoupled_ppo", corrections[variant], {}


FAMILIES = ("ppo_clip", "decoupled_ppo", "truncated_is", "masked_is", "cispo", "sapo", "m2po", "opsm")


@pytest.mark.parametrize("case", [case for family in FAMILIES for case in cases(family)])
def test_policy_losses(case):
    name, corrections, options = policy_loss_of(case)
    inputs, params = flat_inputs(case), case["params"]
    kept = correct(inputs, corrections).kept
    counted = count_denominators(kept, inputs.sequence_ids, inputs.num_sequences)
    if "denominator" in options:
        inputs = replace(inputs, denominators=counted)
    got = run_loss(name, inputs, LossConfig(corrections=corrections, **clip_options(params), **options))
    got |= {"mask": kept, "keep_rows": kept.reshape(matrix(case, "mask").shape).any(dim=1)}
    got["rejected_token_fraction"] = got["outside_fraction"] = 1 - kept.sum() / inputs.mask.sum().double()
    if stem(case).startswith("tis-"):
        rho = (inputs.proximal_logprobs - inputs.behaviour_logprobs)[inputs.mask].exp()
        got["outside_fraction"] = ((rho > corrections[0].cap) | (rho < corrections[0].floor)).double().mean()
    elif params.get("level") == "sequence":
        got["outside_fraction"] = 1 - counted.num_sequences / inputs.num_sequences
    if stem(case).startswith("mis-mask-"):
        wide_open = msgspec.structs.replace(corrections[0], low=0.0, high=math.inf)
        got["weights"] = correct(inputs, (wide_open,)).weights
    check(case, got)


GSPO = {"gspo-seq-mean-token-mean": "gspo_token", "gspo-seq-mean": "gspo", "gspo-token-weighted": "gspo"}
"""verl sends the gradient of a token through that token alone, the others through the mean."""


@pytest.mark.parametrize("case", cases("gspo"))
def test_gspo(case):
    """With one advantage a row the sequence form and the token form have the same gradient."""
    advantages, mask = matrix(case, "advantages"), matrix(case, "mask").bool()
    of_rows = all(len(row[kept].unique()) < 2 for row, kept in zip(advantages, mask, strict=True))
    for name in ("gspo", "gspo_token") if of_rows else (GSPO[stem(case)],):
        check(case, run_loss(name, flat_inputs(case), LossConfig(**clip_options(case["params"]))))


def kl_alone(case, params):
    cap = params.get("cap", 10.0 if peer(case) in {"areal", "openrlhf"} or params["estimator"] == "k3" else float("inf"))
    config = kinds.KLConfig(estimator=params["estimator"], gradient="k2" if params.get("unbiased_gradient") else "own", cap=cap)
    logprobs, mask = matrix(case, "logprobs").requires_grad_(), matrix(case, "mask").bool()
    kl = kl_penalty(logprobs, logprobs, matrix(case, "ref_logprobs"), mask, config)
    loss = kl.sum() / mask.sum()
    loss.backward()
    expected = torch.tensor(case["expected"]["kl_per_token"], dtype=torch.float64)
    # Peers leave the padding as it falls, so only valid tokens are compared.
    return {"loss": loss, "grad_logprobs": logprobs.grad, "kl_per_token": torch.where(mask, kl, expected)}


@pytest.mark.parametrize("case", cases("kl"))
def test_kl(case):
    variant, params = stem(case), case["params"]
    if variant in {"kl-k1", "kl-k2", "kl-k3", "kl-k3-capped"}:
        check(case, kl_alone(case, params))
        return
    gradient = {"grpo-plus-k3": "own", "grpo-plus-k3-ratio": "ratio"}[variant]
    kl = kinds.KLConfig(coefficient=params["beta"], estimator="k3", gradient=gradient, cap=float("inf"))
    config = LossConfig(kl=kl, kl_coefficient=params["beta"], **clip_options(params))
    check(case, run_loss("ppo_clip", flat_inputs(case), config))


@pytest.mark.parametrize("case", cases("prox_approx"))
def test_proximal_approximation(case):
    policies = matrix(case, "logprobs"), matrix(case, "behaviour_logprobs")
    versions = torch.tensor(case["inputs"]["versions"])
    proximal = interpolated_proximal(*policies, versions, current_version=case["params"]["current_version"])
    check(case, {"proximal_logprobs": proximal * matrix(case, "mask")})


@pytest.mark.parametrize("case", cases("loss_aggregation"))
def test_loss_aggregation(case):
    params, mask = case["params"], matrix(case, "mask").bool()
    loss = matrix(case, "loss_matrix").requires_grad_()
    ids = torch.arange(mask.shape[0]).repeat_interleave(mask.shape[1])
    flat_mask, scale = mask.reshape(-1), params.get("loss_scale_factor", 1.0)
    local = count_denominators(flat_mask, ids, mask.shape[0])
    num_tokens = params.get("batch_num_tokens", local.num_tokens)
    denominators = Denominators(num_tokens, params.get("global_batch_size", local.num_sequences), scale)
    value = aggregate(params["mode"], loss.reshape(-1), flat_mask, ids, mask.shape[0], denominators) * params.get("dp_size", 1)
    value.backward()
    check(case, {"loss": value, "grad_loss_matrix": loss.grad})
