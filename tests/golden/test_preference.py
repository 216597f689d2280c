"""DPO and IPO numbers of published implementations (numbers/README.md), values and gradients."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.algorithms.preference import PREFERENCE_LOSSES, PreferenceInputs, preference_loss
from asyncrl.config.algorithm import PreferenceConfig

NUMBERS = Path(__file__).parent / "numbers" / "dpo.json"
TOLERANCE = {"float64": {"rtol": 1e-6, "atol": 1e-8}, "float32": {"rtol": 2e-5, "atol": 2e-6}}


def cases(wanted):
    return [pytest.param(case, id=case["name"]) for case in json.loads(NUMBERS.read_text())["cases"] if wanted(case)]


def config_of(case):
    params = case["params"]
    is_ipo = params.get("ipo", False) or params.get("loss_type") == "ipo"
    return PreferenceConfig(
        loss="ipo" if is_ipo else "sigmoid",
        beta=params["beta"],
        label_smoothing=params.get("label_smoothing", 0.0),
        average="averaged" in case["name"],
    )


def assert_close(case, name, got):
    expected = np.asarray(case["expected"][name], dtype=np.float64)
    np.testing.assert_allclose(got.detach().numpy(), expected, **TOLERANCE[case["dtype"]], err_msg=name)


@pytest.mark.parametrize("case", cases(lambda case: "margins" in case["inputs"]))
def test_losses_from_margins(case):
    margins = torch.tensor(case["inputs"]["margins"], dtype=torch.float64, requires_grad=True)
    config = config_of(case)
    losses = PREFERENCE_LOSSES[config.loss](margins, config)
    losses.mean().backward()
    got = {"loss": losses.mean(), "loss_per_pair": losses, "grad_margins": margins.grad}
    for name in case["expected"]:
        assert_close(case, name, got[name])


def padded(case, name):
    return torch.tensor(case["inputs"][name], dtype=torch.float64)


@pytest.mark.parametrize("case", cases(lambda case: "margins" not in case["inputs"]))
def test_losses_from_tokens(case):
    policy = {side: padded(case, f"policy_{side}_logprobs").requires_grad_() for side in ("chosen", "rejected")}
    pairs = len(policy["chosen"])
    widths = [policy[side].shape[1] for side in ("chosen", "rejected")]

    def flat(chosen, rejected):
        return torch.cat([chosen.reshape(-1), rejected.reshape(-1)])

    inputs = PreferenceInputs(
        logprobs=flat(policy["chosen"], policy["rejected"]),
        reference_logprobs=flat(padded(case, "ref_chosen_logprobs"), padded(case, "ref_rejected_logprobs")),
        mask=flat(padded(case, "chosen_mask"), padded(case, "rejected_mask")).bool(),
        sequence_ids=torch.arange(2 * pairs).repeat_interleave(torch.tensor(widths).repeat_interleave(pairs)),
        num_sequences=2 * pairs,
        pair_ids=torch.arange(pairs).repeat(2),
        is_chosen=torch.arange(2 * pairs) < pairs,
        num_pairs=pairs,
    )
    outputs = preference_loss(inputs, config_of(case))
    outputs.loss.backward()
    got = {
        "loss": outputs.loss,
        "chosen_rewards": outputs.chosen_rewards,
        "rejected_rewards": outputs.rejected_rewards,
        **{f"grad_policy_{side}_logprobs": policy[side].grad for side in policy},
    }
    for name in case["expected"]:
        assert_close(case, name, got[name])
