"""Every advantage against plain loops, and what holds of all of them. Masked tokens hold NaN throughout."""

import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import returns
from asyncrl.algorithms.advantage_types import AdvantageConfig, AdvantageInputs, AdvantageOutputs
from asyncrl.algorithms.advantages import ADVANTAGES, load_advantage, whitened
from asyncrl.algorithms.returns import overlong_penalty
from asyncrl.config.algorithm_table import ADVANTAGE_RULES
from asyncrl.errors import ConfigError

OF_GROUPS = [name for name, rule in ADVANTAGE_RULES.items() if rule.needs_groups]
WHITENED = ["reinforce_pp", "reinforce_pp_baseline"]
CLOSE = {"rtol": 1e-7, "atol": 1e-7}
quick = settings(max_examples=30, deadline=None)

configs = st.builds(
    AdvantageConfig,
    epsilon=st.sampled_from([1e-6, 1e-4]),
    gamma=st.sampled_from([1.0, 0.9]),
    gae_lambda=st.sampled_from([1.0, 0.8]),
    vtrace_rho=st.sampled_from([1.0, 2.0]),
    vtrace_c=st.sampled_from([1.0, 0.5]),
    whiten=st.sampled_from([False, True, "samples"]),
    singleton_keeps_reward=st.booleans(),
    biased_variance=st.booleans(),
)


@st.composite
def steps(draw, token_rewards=None):
    """Inputs with everything an advantage may read; some samples have gaps, some no trained token at all."""
    shape = draw(st.tuples(st.integers(1, 7), st.integers(1, 5)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = random.random(shape) < draw(st.sampled_from([0.3, 0.7, 1.0]))

    def numbers(shape):
        return random.integers(-20, 20, shape) / 10

    has_token_rewards = draw(st.booleans()) if token_rewards is None else token_rewards
    return AdvantageInputs(
        rewards=numbers(shape[0]),
        group_ids=random.integers(3, 6, shape[0]),
        mask=mask,
        token_rewards=np.where(mask, numbers(shape), np.nan) if has_token_rewards else None,
        values=np.where(mask, numbers(shape), np.nan),
        log_ratios=np.where(mask, numbers(shape), np.nan),
        greedy_rewards=numbers(shape[0]),
    )


def slow_sample(name, inputs, config, s):
    """The number of sample s for advantages that give one a sample, and whether it says anything."""
    members = [j for j in range(len(inputs.rewards)) if inputs.group_ids[j] == inputs.group_ids[s]]
    own, all_rewards = float(inputs.rewards[s]), [float(inputs.rewards[j]) for j in members]
    if name == "reward":
        return own, True
    if name == "remax":
        return own - float(inputs.greedy_rewards[s]), True
    if len(members) == 1:
        scale = 1 / (1 + config.epsilon) if name == "grpo" else 1.0
        return (own * scale, True) if config.singleton_keeps_reward else (0.0, False)
    mean = sum(all_rewards) / len(members)
    if name == "grpo_batch":
        return (own - mean) / (statistics.stdev(map(float, inputs.rewards)) + config.epsilon), True
    if name == "grpo":
        deviation = (sum((other - mean) ** 2 for other in all_rewards) / (len(members) - 1)) ** 0.5
        return (own - mean) / (deviation + config.epsilon), True
    if name == "rloo":
        baseline = (sum(all_rewards) - own) / (len(members) - 1)
    elif name == "opo":
        lengths = [int(inputs.mask[j].sum()) for j in members]
        weighted = sum(length * other for length, other in zip(lengths, all_rewards, strict=True))
        baseline = weighted / max(sum(lengths), 1)
    else:
        baseline = mean
    return own - baseline, True


def slow_tokens(name, inputs, config, s):
    """The numbers of the trained tokens of sample s for advantages that give one a token: (advantages, returns)."""
    tokens = [t for t in range(inputs.mask.shape[1]) if inputs.mask[s, t]]
    if inputs.token_rewards is not None:
        rewards = [float(inputs.token_rewards[s, t]) for t in tokens]
    else:
        rewards = [0.0] * (len(tokens) - 1) + [float(inputs.rewards[s])] * bool(tokens)
    values = [float(inputs.values[s, t]) for t in tokens] + [0.0]
    weights = [float(np.exp(inputs.log_ratios[s, t])) for t in tokens]
    gamma, later, carried = config.gamma, 0.0, 0.0
    advantages, targets = [0.0] * len(tokens), [0.0] * len(tokens) + [0.0]
    for i in reversed(range(len(tokens))):
        delta = rewards[i] + gamma * values[i + 1] - values[i]
        if name == "reinforce_pp":
            later = advantages[i] = rewards[i] + gamma * later
        elif name == "gae":
            carried = advantages[i] = delta + gamma * config.gae_lambda * carried
            targets[i] = values[i] + carried
        else:
            rho, c = min(weights[i], config.vtrace_rho), min(weights[i], config.vtrace_c)
            carried = rho * delta + gamma * c * carried
            targets[i] = values[i] + carried
            advantages[i] = rho * (rewards[i] + gamma * targets[i + 1] - values[i])
    return tokens, advantages, targets[:-1]


def slow(name, inputs, config):
    advantages, targets, told = (np.zeros(inputs.mask.shape) for _ in range(3))
    for s in range(len(inputs.rewards)):
        if name in ("reinforce_pp", "gae", "vtrace"):
            tokens, advantages[s, tokens], targets[s, tokens] = slow_tokens(name, inputs, config, s)
            told[s, tokens] = 1
        else:
            number, says = slow_sample(name, inputs, config, s)
            for t in range(inputs.mask.shape[1]):
                if inputs.mask[s, t]:
                    advantages[s, t], told[s, t] = number, says
    if config.whiten or name in WHITENED:
        by_sample = config.whiten == "samples" and name not in WHITENED
        advantages = slow_whitened(advantages, told, config.biased_variance, by_sample)
    return advantages, targets if name in ("gae", "vtrace") else None


def slow_whitened(advantages, told, biased, by_sample):
    rows = [[float(x) for x, says in zip(row, of, strict=True) if says] for row, of in zip(advantages, told, strict=True)]
    numbers = [sum(row) / len(row) for row in rows if row] if by_sample else [x for row in rows for x in row]
    if not numbers:
        return advantages
    mean = sum(numbers) / len(numbers)
    squares = sum((x - mean) ** 2 for x in numbers)
    variance = max(squares / len(numbers), 1e-8) if biased else squares / max(len(numbers) - 1, 1) + 1e-8
    return np.where(told > 0, (advantages - mean) / variance**0.5, 0.0)


def assert_same(got, expected, **tolerance):
    np.testing.assert_allclose(got.advantages, expected.advantages, **(tolerance or CLOSE))
    assert (got.returns is None) == (expected.returns is None)
    if got.returns is not None:
        np.testing.assert_allclose(got.returns, expected.returns, **(tolerance or CLOSE))


def rewarded(rewards, group_ids, lengths=None):
    width = max(lengths) if lengths else 1
    mask = np.arange(width) < np.array(lengths or [1] * len(rewards))[:, None]
    return AdvantageInputs(np.array(rewards, dtype=np.float64), np.array(group_ids), mask)


@pytest.mark.parametrize("name", ADVANTAGES)
@quick
@given(inputs=steps(), config=configs)
def test_it_is_that_of_a_loop(name, inputs, config):
    outputs = ADVANTAGES[name](inputs, config)
    advantages, targets = slow(name, inputs, config)
    # Whitening next to no spread divides rounding errors by 1e-4.
    assert_same(outputs, AdvantageOutputs(advantages, targets), rtol=1e-6, atol=1e-6)
    for values in (outputs.advantages, outputs.returns):
        assert values is None or (values[~inputs.mask] == 0).all()


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("value", [0.1, 0.7, -1 / 3, 1e9])
def test_equal_rewards_have_exactly_zero(name, value):
    """No rounding error is blown up by a tiny deviation."""
    inputs = rewarded([value] * 7 + [value] * 3, [0] * 7 + [1] * 3, lengths=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert (ADVANTAGES[name](inputs, AdvantageConfig()).advantages == 0).all()


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"grpo, grpo_batch, dr_grpo, rloo.*module:function, got 'grop'"):
        load_advantage("grop")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_whitening_equal_values_gives_exact_zeros(biased, num_tokens):
    values = np.full((1, num_tokens), 0.1)
    assert (whitened(values, np.ones_like(values, dtype=bool), biased=biased) == 0).all()


def test_weights_of_policies_far_apart_stay_finite():
    mask = np.ones((1, 2), dtype=bool)
    outputs = returns.vtrace(mask * 1.0, mask * 0.0, np.array([[1e6, -1e6]]), mask, gamma=1.0, rho_bar=np.inf, c_bar=np.inf)
    assert np.isfinite(outputs.advantages).all()
    assert outputs.advantages[0, 1] == pytest.approx(np.exp(-returns.LOG_RATIO_LIMIT))


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_nothing_trained_gives_zeros(shape):
    nothing, mask = np.full(shape, np.nan), np.zeros(shape, dtype=bool)
    inputs = AdvantageInputs(np.zeros(shape[0]), np.arange(shape[0]), mask, nothing, nothing, nothing, np.zeros(shape[0]))
    for advantage in ADVANTAGES.values():
        np.testing.assert_array_equal(advantage(inputs, AdvantageConfig()).advantages, np.zeros(shape))


@given(length=st.integers(0, 50), max_tokens=st.integers(1, 30), buffer_tokens=st.integers(1, 30))
def test_the_overlong_penalty_is_that_of_the_paper(length, max_tokens, buffer_tokens):
    """DAPO's equation 13, case by case."""
    inside = ((max_tokens - buffer_tokens) - length) / buffer_tokens if length <= max_tokens else -1.0
    expected = 0.0 if length <= max_tokens - buffer_tokens else inside
    assert overlong_penalty(length, max_tokens, buffer_tokens) == pytest.approx(expected)


@pytest.mark.parametrize("module", ["advantages", "returns"])
def test_what_runs_without_tensors_imports_no_torch(module):
    code = f"import sys, asyncrl.algorithms.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
