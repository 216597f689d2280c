"""Numbers of published advantages, value losses and overlong penalties (numbers/README.md). An unknown case name fails."""

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import ADVANTAGES, AdvantageConfig, AdvantageInputs, discounted_returns, overlong_penalty
from asyncrl.algorithms.losses import ValueInputs, value_loss
from asyncrl.algorithms.types import Denominators
from tests.golden.cases import assert_close, cases, matrix


def stem(case):
    """`rloo-singleton` of `rloo-singleton-verl-s0`."""
    return case["name"].rsplit("-", 2)[0]


def peer(case):
    return case["name"].rsplit("-", 2)[1]


def array(case, name, dtype=np.float64):
    return np.asarray(case["inputs"][name], dtype=dtype)


def assert_all(case, got):
    """Every expected key is there and close, and nothing is compared by broadcasting."""
    assert set(got) == set(case["expected"])
    for name, value in got.items():
        assert np.shape(value) == np.shape(case["expected"][name]), name
        assert_close(case, name, value)


ADVANTAGE_OF = {
    **dict.fromkeys(("grpo", "grpo-eps1e5", "group-norm", "grpo-singleton"), "grpo"),
    **dict.fromkeys(("rloo", "rloo-singleton"), "rloo"),
    **dict.fromkeys(("reinforce-pp-baseline", "reinforce-baseline"), "reinforce_pp_baseline"),
    **{name: name.replace("-", "_") for name in ("dr-grpo", "opo", "reinforce-pp")},
}


@pytest.mark.parametrize("case", cases("advantages"))
def test_advantages(case):
    """A group of one is their own reward in verl, and 0 here; OpenRLHF whitens by the biased variance."""
    params, has_tokens = case["params"], "token_rewards" in case["inputs"]
    num_samples = len(case["inputs"]["token_rewards" if has_tokens else "rewards"])
    inputs = AdvantageInputs(
        rewards=np.full(num_samples, np.nan) if has_tokens else array(case, "rewards"),
        group_ids=array(case, "group_ids", np.int64) if "group_ids" in case["inputs"] else np.arange(num_samples),
        mask=array(case, "mask", np.bool_) if "mask" in case["inputs"] else np.ones((num_samples, 1), dtype=bool),
        token_rewards=array(case, "token_rewards") if has_tokens else None,
    )
    config = AdvantageConfig(epsilon=params.get("eps", 1e-6), gamma=params.get("gamma", 1.0))
    advantages = ADVANTAGES[ADVANTAGE_OF[stem(case)]](inputs, config).advantages
    if stem(case).endswith("-singleton"):
        is_alone = (inputs.group_ids[:, None] == inputs.group_ids).sum(axis=1) == 1
        assert is_alone.any()
        assert (advantages[is_alone] == 0).all()
        advantages[is_alone] = np.asarray(case["expected"]["advantages"])[is_alone]
    if stem(case) == "reinforce-baseline":
        advantages *= np.sqrt(inputs.mask.sum() / (inputs.mask.sum() - 1))
    got = {"row_advantages": advantages[:, 0]} if "row_advantages" in case["expected"] else {"advantages": advantages}
    if has_tokens:
        got["returns"] = discounted_returns(inputs.token_rewards, inputs.mask, config.gamma)
    assert_all(case, got)


def of_tokens(name, mask, rewards, values, log_ratios=None, **options):
    inputs = AdvantageInputs(np.full(len(mask), np.nan), np.arange(len(mask)), mask, rewards, values, log_ratios)
    return ADVANTAGES[name](inputs, AdvantageConfig(**options))


def over_episodes(case, ends, worth_after, compute):
    """(advantages, returns), each episode a sample of its own: what comes after its last step counts as reward of that step."""
    rewards = array(case, "rewards")
    found = np.zeros((2, *rewards.shape))
    for s in range(len(rewards)):
        start = 0
        for end in sorted({*np.flatnonzero(ends[s]).tolist(), rewards.shape[1] - 1}):
            part = (slice(s, s + 1), slice(start, end + 1))
            own = rewards[part].copy()
            own[0, -1] += worth_after[s, end]
            outputs = compute(part, own, np.ones(own.shape, dtype=bool))
            found[0][part], found[1][part] = outputs.advantages, outputs.returns
            start = end + 1
    return found


def worth_after_episodes(case):
    return case["params"]["gamma"] * np.where(array(case, "terminated", np.bool_), 0.0, array(case, "next_values"))


def gae_over_steps(case):
    values, params = array(case, "values"), case["params"]
    advantages, targets = over_episodes(
        case, array(case, "done", np.bool_), worth_after_episodes(case),
        lambda part, rewards, mask: of_tokens(
            "gae", mask, rewards, values[part], gamma=params["gamma"], gae_lambda=params["lam"]
        ),
    )  # fmt: skip
    return {"advantages": advantages, "returns": targets}


def gae_discounting_gaps(case):
    """OpenRLHF discounts through what the policy did not write: steps of value and reward 0."""
    params, mask = case["params"], array(case, "mask", np.bool_)
    rewards, values = (np.where(mask, array(case, name), 0.0) for name in ("token_rewards", "values"))
    outputs = of_tokens("gae", np.ones_like(mask), rewards, values, gamma=params["gamma"], gae_lambda=params["lam"])
    return {"advantages": outputs.advantages * mask, "returns": outputs.returns * mask}


def gae_skipping_gaps(case):
    arrays = array(case, "mask", np.bool_), array(case, "token_rewards"), array(case, "values")
    options = {"gamma": case["params"]["gamma"], "gae_lambda": case["params"]["lam"]}
    outputs, white = (of_tokens("gae", *arrays, **options, whiten=whiten) for whiten in (False, True))
    np.testing.assert_array_equal(white.returns, outputs.returns)
    got = {"advantages": outputs.advantages, "returns": outputs.returns, "advantages_whitened": white.advantages}
    return {name: got[name] for name in got if name in case["expected"]}


GAE_OF = {"gae-skip-gaps": gae_skipping_gaps, "gae-discount-gaps": gae_discounting_gaps}


@pytest.mark.parametrize("case", cases("gae"))
def test_gae(case):
    assert_all(case, GAE_OF.get(stem(case), gae_over_steps)(case))


@pytest.mark.parametrize("case", cases("vtrace"))
def test_vtrace(case):
    """torchbeast bounds the advantage's weight by a number of its own, and says by discounts of 0 where episodes end."""
    params, values = case["params"], array(case, "values")
    log_ratios = array(case, "logprobs") - array(case, "behaviour_logprobs")
    rho_bar, c_bar = (np.inf if params[name] is None else params[name] for name in ("rho_bar", "c_bar"))
    if peer(case) == "torchbeast":
        discounts, after = array(case, "discounts"), np.zeros_like(values)
        gamma, ends, pg_rho_bar = discounts.max(), discounts == 0, params["pg_rho_bar"]
        after[:, -1] = discounts[:, -1] * array(case, "bootstrap_values")
    else:
        gamma, ends, pg_rho_bar = params["gamma"], array(case, "done", np.bool_), params["rho_bar"]
        after = worth_after_episodes(case)
    advantages, targets = over_episodes(
        case, ends, after,
        lambda part, rewards, mask: of_tokens(
            "vtrace", mask, rewards, values[part], log_ratios[part], gamma=gamma, vtrace_rho=rho_bar, vtrace_c=c_bar
        ),
    )  # fmt: skip
    weights = np.exp(log_ratios)
    advantages *= np.minimum(weights, np.inf if pg_rho_bar is None else pg_rho_bar) / np.minimum(weights, rho_bar)
    assert_all(case, {"vs": targets, "pg_advantages": advantages})


@pytest.mark.parametrize("case", cases("value_loss"))
def test_value_loss(case):
    mask_BT = torch.tensor(case["inputs"]["mask"], dtype=torch.bool)
    values = matrix(case, "values").requires_grad_()
    inputs = ValueInputs(
        values=values.reshape(-1),
        old_values=matrix(case, "old_values").reshape(-1),
        returns=matrix(case, "returns").reshape(-1),
        mask=mask_BT.reshape(-1),
        sequence_ids=torch.arange(len(mask_BT)).repeat_interleave(mask_BT.shape[1]),
        num_sequences=len(mask_BT),
        denominators=Denominators(int(mask_BT.sum()), int(mask_BT.any(dim=1).sum())),
    )
    loss, clipped = value_loss(inputs, clip=case["params"]["clip"], aggregation=case["params"]["aggregation"])
    loss.backward()
    got = {"loss": loss.item(), "grad_values": values.grad.numpy()}
    if "clip_fraction" in case["expected"]:
        got["clip_fraction"] = clipped.sum().item() / int(mask_BT.sum())
    assert_all(case, got)
    assert (values.grad[~mask_BT] == 0).all()


@pytest.mark.parametrize("case", cases("overlong"))
def test_overlong_penalty(case):
    params, lengths, rewards = case["params"], case["inputs"]["lengths"], case["inputs"]["rewards"]
    penalties = [params["factor"] * overlong_penalty(length, params["max_length"], params["buffer"]) for length in lengths]
    rewarded = [reward + penalty for reward, penalty in zip(rewards, penalties, strict=True)]
    assert_all(case, {"rewards": rewarded, "penalised": sum(penalty < 0 for penalty in penalties)})
