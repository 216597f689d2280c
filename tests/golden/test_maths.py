"""Numbers of published implementations of losses, corrections, KL and aggregation (numbers/README.md), values and gradients.

A case's name and params choose the options; a case, a parameter or an expected output that nothing here knows fails. Advantages,
preferences and diagnostics have files of their own beside this one.
"""

import math
import re

import pytest
import torch

from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.kl import interpolated_proximal, kl_penalty
from asyncrl.algorithms.loss_terms import aggregate, count_denominators
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.types import Denominators, LossConfig, LossInputs
from asyncrl.config import algorithm as kinds
from tests.golden.cases import assert_close, cases, matrix

EXACT = {"mask", "keep_rows", "clip_count", "dual_clip_count"}
KNOWN_PARAMS = {
    "ppo_clip": {"eps_low", "eps_high", "dual_clip", "aggregation", "constant"},
    "decoupled_ppo": {"eps_low", "eps_high", "dual_clip", "aggregation", "cap"},
    "truncated_is": {"eps_low", "eps_high", "level", "cap", "low", "high", "batch_normalize"},
    "masked_is": {"eps_low", "eps_high", "level", "gate", "weight", "low", "high", "option"},
    "gspo": {"eps_low", "eps_high", "aggregation"},
    "cispo": {"eps_low", "eps_high", "max_ratio"},
    "sapo": {"tau_pos", "tau_neg", "aggregation"},
    "kl": {"estimator", "cap", "unbiased_gradient", "beta", "eps_low", "eps_high", "aggregation", "kl_times_ratio"},
    "m2po": {"threshold", "eps_low", "eps_high"},
    "opsm": {"threshold", "eps_low", "eps_high", "aggregation"},
    "prox_approx": {"method", "current_version"},
    "loss_aggregation": {
        "mode", "dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor", "token_level_loss",
    },
}  # fmt: skip


def params_of(case, family):
    assert set(case["params"]) <= KNOWN_PARAMS[family], f"{case['name']} has parameters that no option answers to"
    return case["params"]


def stem(case):
    """The variant: the name without seed, position and peer."""
    return re.sub(r"-(verl|areal|openrlhf|trl|slime)(-\d+)?(-s\d+)?$", "", case["name"])


def peer(case):
    return case["source"].split()[0]


def check(case, got):
    assert set(case["expected"]) <= set(got), f"{case['name']} expects outputs that nothing computes"
    for name in case["expected"]:
        assert_close(case, name, got[name], "int" if name in EXACT else "")


def flat_inputs(case):
    """The case as one micro-batch; what it does not give is on policy. TRL counts rows without a token, the others do not."""
    mask_BT = matrix(case, "mask").bool()
    rows, width = mask_BT.shape
    given = case["inputs"]
    first = next(name for name in ("proximal_logprobs", "logprobs") if name in given)
    proximal = matrix(case, first)
    current = matrix(case, "logprobs") if "logprobs" in given else proximal.clone()
    behaviour = matrix(case, "behaviour_logprobs") if "behaviour_logprobs" in given else proximal
    advantages = torch.zeros_like(proximal)
    if "advantages" in given:
        advantages = matrix(case, "advantages")
    elif "row_advantages" in given:
        advantages = matrix(case, "row_advantages").unsqueeze(1).expand(rows, width)
    num_sequences = rows if peer(case) == "trl" else int(mask_BT.any(dim=1).sum())
    return LossInputs(
        logprobs=current.reshape(-1).requires_grad_(),
        proximal_logprobs=proximal.reshape(-1),
        behaviour_logprobs=behaviour.reshape(-1),
        advantages=advantages.reshape(-1),
        mask=mask_BT.reshape(-1),
        sequence_ids=torch.arange(rows).repeat_interleave(width),
        num_sequences=rows,
        denominators=Denominators(int(mask_BT.sum()), num_sequences, case["params"].get("constant", 1.0)),
        reference_logprobs=matrix(case, "ref_logprobs").reshape(-1) if "ref_logprobs" in given else None,
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


@pytest.mark.parametrize("case", cases("ppo_clip"))
def test_ppo_clip(case):
    params = params_of(case, "ppo_clip")
    assert stem(case).startswith(("ppo-clip-", "ppo-dual-clip-"))
    check(case, run_loss("ppo_clip", flat_inputs(case), LossConfig(**clip_options(params))))


DECOUPLED = {
    "decoupled-uncapped": ("decoupled_ppo", False),
    "decoupled-capped": ("decoupled_ppo", True),
    "decoupled-clip-higher-dual-capped": ("decoupled_ppo", True),
    "decoupled-capped-dual-seqmean": ("decoupled_ppo", True),
    "decoupled-no-weight": ("ppo_clip", False),
}


@pytest.mark.parametrize("case", cases("decoupled_ppo"))
def test_decoupled_ppo(case):
    params = params_of(case, "decoupled_ppo")
    name, is_capped = DECOUPLED[stem(case)]
    corrections = (kinds.TruncatedToken(cap=params["cap"]),) if is_capped else ()
    check(case, run_loss(name, flat_inputs(case), LossConfig(corrections=corrections, **clip_options(params))))


@pytest.mark.parametrize("case", cases("truncated_is"))
def test_truncated_importance_sampling(case):
    params = params_of(case, "truncated_is")
    of_tokens = {"tis-token": True, "tis-token-two-sided": True, "tis-sequence": False}[stem(case)]
    kind = kinds.TruncatedToken if of_tokens else kinds.TruncatedSequence
    assert params["level"] == ("token" if of_tokens else "sequence")
    correction = kind(
        cap=params["high"] if "high" in params else params["cap"],
        floor=params.get("low", 0.0),
        normalize=params.get("batch_normalize", False),
    )
    inputs = flat_inputs(case)
    got = run_loss("decoupled_ppo", inputs, LossConfig(corrections=(correction,), **clip_options(params)))
    rho = (inputs.proximal_logprobs - inputs.behaviour_logprobs)[inputs.mask].exp()
    check(case, got | {"outside_fraction": ((rho > correction.cap) | (rho < correction.floor)).double().mean()})


def masking(case, params):
    """The correction of a masked_is case."""
    band = {"low": params["low"], "high": params["high"]}
    logs = {"low": math.log(params["low"]), "high": math.log(params["high"])}
    by_stem = {
        "icepop-token": kinds.MaskedToken(**band),
        "icepop-sequence": kinds.MaskedSequence(**band, weight="sequence"),
        "sequence-mask-geo": kinds.MaskedGeometric(**band, weight="geometric"),
        "sequence-mask-geo-gate-token-weight": kinds.MaskedGeometric(**band, weight="token"),
        "rejection-seq_sum_k1": kinds.Rejection(level="sum", measure="k1", **logs),
        "rejection-seq_mean_k1": kinds.Rejection(level="mean", measure="k1", **logs),
        "mis-mask-token": kinds.MaskedToken(**band),
        "mis-mask-sequence": kinds.MaskedSequence(**band, weight="sequence"),
        "mis-mask-geometric": kinds.MaskedGeometric(**band, weight="geometric"),
    }
    return by_stem[stem(case)]


@pytest.mark.parametrize("case", cases("masked_is"))
def test_masked_importance_sampling(case):
    params = params_of(case, "masked_is")
    correction = masking(case, params)
    inputs = flat_inputs(case)
    got = run_loss("decoupled_ppo", inputs, LossConfig(corrections=(correction,), **clip_options(params)))
    kept = correct(inputs, (correction,)).kept
    dropped_fraction = 1 - kept.sum() / inputs.mask.sum().double()
    kept_rows = count_denominators(kept, inputs.sequence_ids, inputs.num_sequences).num_sequences
    of_rows = params.get("level") == "sequence"
    got |= {
        "mask": kept,
        "rejected_token_fraction": dropped_fraction,
        "outside_fraction": 1 - kept_rows / inputs.num_sequences if of_rows else dropped_fraction,
    }
    if stem(case).startswith("mis-mask-"):
        wide_open = type(correction)(**{field: getattr(correction, field) for field in correction.__struct_fields__}
                                     | {"low": 0.0, "high": math.inf})  # fmt: skip
        got["weights"] = correct(inputs, (wide_open,)).weights
    check(case, got)


GSPO = {"gspo-seq-mean-token-mean": "gspo_token", "gspo-seq-mean": "gspo", "gspo-token-weighted": "gspo"}
"""verl sends the gradient of a token through that token alone, the others through the mean."""


@pytest.mark.parametrize("case", cases("gspo"))
def test_gspo(case):
    """With one advantage a row the sequence form and the token form have the same gradient."""
    params = params_of(case, "gspo")
    advantages, mask = matrix(case, "advantages"), matrix(case, "mask").bool()
    of_rows = all(len(row[kept].unique()) < 2 for row, kept in zip(advantages, mask, strict=True))
    for name in ("gspo", "gspo_token") if of_rows else (GSPO[stem(case)],):
        check(case, run_loss(name, flat_inputs(case), LossConfig(**clip_options(params))))


@pytest.mark.parametrize("case", cases("cispo"))
def test_cispo(case):
    params = params_of(case, "cispo")
    assert stem(case) == "cispo"
    low = 1.0 - params["eps_low"] if "eps_low" in params else 0.0
    check(case, run_loss("cispo", flat_inputs(case), LossConfig(max_ratio=params["max_ratio"], min_ratio=low)))


@pytest.mark.parametrize("case", cases("sapo"))
def test_sapo(case):
    params = params_of(case, "sapo")
    assert stem(case) in {"sapo", "sapo-token-mean"}
    config = LossConfig(tau_positive=params["tau_pos"], tau_negative=params["tau_neg"], aggregation=params["aggregation"])
    check(case, run_loss("sapo", flat_inputs(case), config))


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
    params = params_of(case, "kl")
    variant = stem(case)
    if variant in {"kl-k1", "kl-k2", "kl-k3", "kl-k3-capped"}:
        check(case, kl_alone(case, params))
        return
    gradient = {"grpo-plus-k3": "own", "grpo-plus-k3-ratio": "ratio"}[variant]
    assert params["kl_times_ratio"] == (gradient == "ratio")
    kl = kinds.KLConfig(coefficient=params["beta"], estimator="k3", gradient=gradient, cap=float("inf"))
    config = LossConfig(kl=kl, kl_coefficient=params["beta"], **clip_options(params))
    check(case, run_loss("ppo_clip", flat_inputs(case), config))


@pytest.mark.parametrize("case", cases("m2po"))
def test_m2po_mask(case):
    params = params_of(case, "m2po")
    assert stem(case) in {"m2po-mask-a", "m2po-mask-b"}
    corrections = (kinds.SecondMomentMask(threshold=params["threshold"]),)
    inputs = flat_inputs(case)
    kept = correct(inputs, corrections).kept
    counted = count_denominators(kept, inputs.sequence_ids, inputs.num_sequences)
    fields = {name: getattr(inputs, name) for name in LossInputs.__dataclass_fields__} | {"denominators": counted}
    config = LossConfig(corrections=corrections, denominator="kept", **clip_options(params))
    check(case, run_loss("ppo_clip", LossInputs(**fields), config) | {"mask": kept})


@pytest.mark.parametrize("case", cases("opsm"))
def test_opsm(case):
    params = params_of(case, "opsm")
    assert stem(case) in {"opsm-mask", "opsm-loss-token-mean", "opsm-loss-seq-mean"}
    corrections = (kinds.OffPolicySequenceMask(threshold=params["threshold"]),)
    inputs = flat_inputs(case)
    kept_BT = correct(inputs, corrections).kept.reshape(matrix(case, "mask").shape)
    got = run_loss("ppo_clip", inputs, LossConfig(corrections=corrections, **clip_options(params)))
    check(case, got | {"keep_rows": kept_BT.any(dim=1)})


@pytest.mark.parametrize("case", cases("prox_approx"))
def test_proximal_approximation(case):
    params = params_of(case, "prox_approx")
    assert (stem(case), params["method"]) == ("prox-loglinear", "loglinear")
    proximal = interpolated_proximal(
        matrix(case, "logprobs"),
        matrix(case, "behaviour_logprobs"),
        torch.tensor(case["inputs"]["versions"]),
        matrix(case, "mask").bool(),
        current_version=params["current_version"],
    )
    check(case, {"proximal_logprobs": proximal})


@pytest.mark.parametrize("case", cases("loss_aggregation"))
def test_loss_aggregation(case):
    params = params_of(case, "loss_aggregation")
    variant = re.sub(r"-(global|emptyrow)", "", stem(case).removeprefix("agg-"))
    assert variant == params["mode"]
    loss, mask = matrix(case, "loss_matrix").requires_grad_(), matrix(case, "mask").bool()
    ids = torch.arange(mask.shape[0]).repeat_interleave(mask.shape[1])
    flat_mask, scale = mask.reshape(-1), params.get("loss_scale_factor", 1.0)
    local = count_denominators(flat_mask, ids, mask.shape[0])
    denominators = Denominators(
        params.get("batch_num_tokens", local.num_tokens), params.get("global_batch_size", local.num_sequences), scale
    )
    mode = {"seq-mean-token-sum-norm": "constant"}.get(params["mode"], params["mode"])
    value = aggregate(mode, loss.reshape(-1), flat_mask, ids, mask.shape[0], denominators)
    value = value * params.get("dp_size", 1)
    value.backward()
    check(case, {"loss": value, "grad_loss_matrix": loss.grad})
