"""DPO and IPO numbers of published implementations (numbers/README.md), values and gradients."""

import pytest
import torch

from asyncrl.algorithms.preference import PREFERENCE_LOSSES, Pairs, preference_loss
from asyncrl.algorithms.types import Denominators, LossInputs
from asyncrl.config.algorithm import PreferenceConfig
from tests.golden.cases import assert_close, cases, matrix


def config_of(case):
    params = case["params"]
    is_ipo = params.get("ipo", False) or params.get("loss_type") == "ipo"
    return PreferenceConfig(
        loss="ipo" if is_ipo else "sigmoid",
        beta=params["beta"],
        label_smoothing=params.get("label_smoothing", 0.0),
        average="averaged" in case["name"],
    )


@pytest.mark.parametrize("case", cases("dpo", lambda case: "margins" in case["inputs"]))
def test_losses_from_margins(case):
    margins = matrix(case, "margins").requires_grad_()
    config = config_of(case)
    losses = PREFERENCE_LOSSES[config.loss](margins, config)
    losses.mean().backward()
    got = {"loss": losses.mean(), "loss_per_pair": losses, "grad_margins": margins.grad}
    for name in case["expected"]:
        assert_close(case, name, got[name])


@pytest.mark.parametrize("case", cases("dpo", lambda case: "margins" not in case["inputs"]))
def test_losses_from_tokens(case):
    policy = {side: matrix(case, f"policy_{side}_logprobs").requires_grad_() for side in ("chosen", "rejected")}
    pairs = len(policy["chosen"])
    widths = [policy[side].shape[1] for side in ("chosen", "rejected")]

    def flat(chosen, rejected):
        return torch.cat([chosen.reshape(-1), rejected.reshape(-1)])

    logprobs = flat(policy["chosen"], policy["rejected"])
    inputs = LossInputs(
        logprobs, logprobs.detach(), logprobs.detach(), torch.zeros_like(logprobs),
        mask=flat(matrix(case, "chosen_mask"), matrix(case, "rejected_mask")).bool(),
        sequence_ids=torch.arange(2 * pairs).repeat_interleave(torch.tensor(widths).repeat_interleave(pairs)),
        num_sequences=2 * pairs,
        denominators=Denominators(1, 1),
        reference_logprobs=flat(matrix(case, "ref_chosen_logprobs"), matrix(case, "ref_rejected_logprobs")),
    )  # fmt: skip
    sides = Pairs(torch.arange(pairs).repeat(2), torch.arange(2 * pairs) < pairs, pairs)
    loss, figures = preference_loss(inputs, sides, config_of(case))
    loss.backward()
    got = {
        "loss": loss,
        "chosen_rewards": figures["dpo/chosen_reward"],
        "rejected_rewards": figures["dpo/rejected_reward"],
        **{f"grad_policy_{side}_logprobs": policy[side].grad for side in policy},
    }
    for name in case["expected"]:
        assert_close(case, name, got[name])
