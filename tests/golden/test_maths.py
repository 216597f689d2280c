"""Numbers of published implementations (numbers/README.md), values and gradients."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.algorithms.aggregation import AGGREGATIONS
from asyncrl.algorithms.kl import KL_ESTIMATORS, capped
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.ratios import effective_sample_size
from asyncrl.algorithms.types import Denominators, LossConfig, LossInputs

NUMBERS = Path(__file__).parent / "numbers"
TOLERANCE = {"float64": {"rtol": 1e-6, "atol": 1e-8}, "float32": {"rtol": 2e-5, "atol": 2e-6}}


def cases(family, wanted=lambda case: True):
    loaded = json.loads((NUMBERS / f"{family}.json").read_text())["cases"]
    return [pytest.param(case, id=case["name"]) for case in loaded if wanted(case)]


def matrix(case, name):
    return torch.tensor(case["inputs"][name], dtype=torch.float64)


def assert_close(case, name, got):
    expected = np.asarray(case["expected"][name], dtype=np.float64)
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else np.asarray(got, dtype=np.float64)
    np.testing.assert_allclose(got.reshape(expected.shape), expected, **TOLERANCE[case["dtype"]], err_msg=name)


def flat_inputs(case, every_row_counts=False):
    mask_BT = matrix(case, "mask").bool()
    rows, width = mask_BT.shape
    proximal = matrix(case, "proximal_logprobs")
    current = matrix(case, "logprobs") if "logprobs" in case["inputs"] else proximal.clone()
    behaviour = matrix(case, "behaviour_logprobs") if "behaviour_logprobs" in case["inputs"] else proximal
    advantages = matrix(case, "advantages") if "advantages" in case["inputs"] else torch.zeros_like(proximal)
    num_sequences = rows if every_row_counts else int(mask_BT.any(dim=1).sum())
    return LossInputs(
        logprobs=current.reshape(-1).requires_grad_(),
        proximal_logprobs=proximal.reshape(-1),
        behaviour_logprobs=behaviour.reshape(-1),
        advantages=advantages.reshape(-1),
        mask=mask_BT.reshape(-1),
        sequence_ids=torch.arange(rows).repeat_interleave(width),
        num_sequences=rows,
        denominators=Denominators(int(mask_BT.sum()), num_sequences, case["params"].get("constant", 1.0)),
    )


def loss_config(case, **more):
    params = case["params"]
    return LossConfig(
        clip_low=params.get("eps_low", 0.2),
        clip_high=params.get("eps_high", 0.2),
        dual_clip=params.get("dual_clip"),
        correction_cap=params.get("cap", params.get("high", float("inf"))),
        correction_floor=params.get("low", 0.0),
        aggregation=params.get("aggregation", "token-mean"),
        **more,
    )


@pytest.mark.parametrize("case", cases("ppo_clip"))
def test_ppo_clip(case):
    inputs = flat_inputs(case, every_row_counts="-trl-" in case["name"])
    outputs = LOSSES["ppo_clip"](inputs, loss_config(case))
    outputs.loss.backward()
    assert_close(case, "loss", outputs.loss)
    assert_close(case, "grad_logprobs", inputs.logprobs.grad)
    count = inputs.mask.sum()
    negative_dual = outputs.dual_clipped & inputs.mask
    by_name = {
        "clip_fraction": (outputs.clipped & inputs.mask).sum() / count,
        "clip_count": (outputs.clipped & inputs.mask).sum(),
        "dual_clip_count": negative_dual.sum(),
        "dual_clip_fraction": negative_dual.sum() / count,
        "approx_kl": (inputs.proximal_logprobs - inputs.logprobs)[inputs.mask].mean(),
    }
    for name in set(case["expected"]) & set(by_name):
        assert_close(case, name, by_name[name])


@pytest.mark.parametrize("case", cases("decoupled_ppo"))
def test_decoupled_ppo(case):
    inputs = flat_inputs(case)
    correction = "none" if "no-weight" in case["name"] else "tis_token"
    outputs = LOSSES["decoupled_ppo"](inputs, loss_config(case, correction=correction))
    outputs.loss.backward()
    assert_close(case, "loss", outputs.loss)
    assert_close(case, "grad_logprobs", inputs.logprobs.grad)
    if "weights" in case["expected"]:
        assert_close(case, "weights", outputs.weights)


@pytest.mark.parametrize("case", cases("truncated_is"))
def test_truncated_importance_sampling(case):
    inputs = flat_inputs(case)
    config = loss_config(case, correction=f"tis_{case['params']['level']}")
    outputs = LOSSES["decoupled_ppo"](inputs, config)
    outputs.loss.backward()
    kept = outputs.weights[inputs.mask]
    rho = (inputs.proximal_logprobs - inputs.behaviour_logprobs)[inputs.mask].exp()
    by_name = {
        "loss": outputs.loss,
        "grad_logprobs": inputs.logprobs.grad,
        "weights": outputs.weights,
        "ess_fraction": effective_sample_size(outputs.weights, inputs.mask),
        "weight_mean": kept.mean(),
        "weight_std": kept.std(correction=0),
        "behaviour_kl_k1": -rho.log().mean(),
        "outside_fraction": ((rho > config.correction_cap) | (rho < config.correction_floor)).double().mean(),
    }
    for name in case["expected"]:
        assert_close(case, name, by_name[name])


@pytest.mark.parametrize("case", cases("loss_aggregation"))
def test_loss_aggregation(case):
    params = case["params"]
    loss = matrix(case, "loss_matrix").requires_grad_()
    mask = matrix(case, "mask").bool()
    ids = torch.arange(mask.shape[0]).repeat_interleave(mask.shape[1])
    denominators = Denominators(
        params.get("batch_num_tokens", int(mask.sum())),
        params.get("global_batch_size", int(mask.any(dim=1).sum())),
        params.get("loss_scale_factor", 1.0),
    )
    aggregate = AGGREGATIONS[{"seq-mean-token-sum-norm": "constant"}.get(params["mode"], params["mode"])]
    value = aggregate(loss.reshape(-1), mask.reshape(-1), ids, mask.shape[0], denominators) * params.get("dp_size", 1)
    value.backward()
    assert_close(case, "loss", value)
    assert_close(case, "grad_loss_matrix", loss.grad)


@pytest.mark.parametrize("case", cases("kl", lambda case: "estimator" in case["params"]))
def test_kl(case):
    logprobs, reference = matrix(case, "logprobs").requires_grad_(), matrix(case, "ref_logprobs")
    mask = matrix(case, "mask")
    kl = KL_ESTIMATORS[case["params"]["estimator"]](logprobs, reference)
    kl = capped(kl, 10.0)
    loss = (kl * mask).sum() / mask.sum()
    loss.backward()
    assert_close(case, "loss", loss)
    assert_close(case, "grad_logprobs", logprobs.grad)
    expected = torch.tensor(case["expected"]["kl_per_token"], dtype=torch.float64)
    np.testing.assert_allclose((kl * mask).detach(), expected * mask, **TOLERANCE[case["dtype"]])
