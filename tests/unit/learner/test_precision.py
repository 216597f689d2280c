import math

import pytest
import torch

from asyncrl.config.algorithm import CriticConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.critic import SeparateCritic, ValueHead, build_critic_optimizer
from asyncrl.learner.optim import PolicyOptimizer, skip_update
from asyncrl.learner.precision import FIRST_SCALE, GROWTH_INTERVAL, SMALLEST_SCALE, LossScale
from asyncrl.learner.step import train_step

HALF = LearnerConfig(dtype="float16", learning_rate=0.1, warmup_steps=0, max_grad_norm=1e9)


def half_parameter(values=(1.0, 2.0)):
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float16))


def optimizer_of(parameter, config=HALF, **rest):
    return PolicyOptimizer([("p", parameter)], config, 10, **rest)


def test_the_scale_halves_and_after_many_good_updates_doubles():
    scale = LossScale()
    assert scale.shrink()
    assert scale.value == FIRST_SCALE / 2
    for _ in range(GROWTH_INTERVAL):
        assert scale.value == FIRST_SCALE / 2
        scale.note_update()
    assert scale.value == FIRST_SCALE


def test_an_overflow_begins_the_count_again():
    scale = LossScale()
    for _ in range(GROWTH_INTERVAL - 1):
        scale.note_update()
    scale.shrink()
    scale.note_update()
    assert scale.value == FIRST_SCALE / 2


def test_at_the_smallest_scale_an_overflow_is_an_error():
    scale, halvings = LossScale(), 0
    while scale.shrink():
        halvings += 1
    assert scale.value == SMALLEST_SCALE
    assert halvings == 16


def test_gradients_too_small_for_float16_reach_the_weights():
    parameter, factor = half_parameter(), 2.0**-27
    optimizer = optimizer_of(parameter)
    optimizer.backward((parameter.float() * factor).sum())
    assert optimizer.clip() == pytest.approx(factor * 2**0.5)
    plain = half_parameter()
    (plain.float() * factor).sum().backward()
    assert torch.count_nonzero(plain.grad) == 0, "without scaling they are lost"


def test_the_step_is_that_of_float32():
    half, full = half_parameter(), torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    max_grad_norm = 2.0**-9
    for parameter, dtype in ((half, "float16"), (full, "float32")):
        config = LearnerConfig(dtype=dtype, learning_rate=0.1, warmup_steps=0, max_grad_norm=max_grad_norm)
        optimizer = optimizer_of(parameter, config)
        for step in range(3):
            for _ in range(2):
                optimizer.backward((parameter.float() ** 2).sum() * 2.0**-8)
            assert optimizer.clip() > max_grad_norm
            optimizer.step(step)
    torch.testing.assert_close(half.float(), full, rtol=2e-3, atol=0.0)


def test_an_overflow_changes_no_weight_and_halves_the_scale():
    parameter = half_parameter()
    optimizer = optimizer_of(parameter)
    before = parameter.detach().clone()
    optimizer.backward((parameter.float() * 10.0).sum())
    norm = optimizer.clip()
    assert norm == float("inf")
    assert skip_update([(optimizer, norm)])
    assert optimizer.loss_scale == FIRST_SCALE / 2
    assert torch.equal(parameter, before)
    assert parameter.grad is None
    optimizer.backward((parameter.float() * 0.1).sum())
    assert optimizer.clip() == pytest.approx(0.1 * 2**0.5, rel=1e-3)
    optimizer.step(0)
    torch.testing.assert_close(parameter, before - 0.1, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_never_skip(dtype):
    config = LearnerConfig(dtype=dtype)
    parameter = torch.nn.Parameter(torch.ones(2, dtype=getattr(torch, dtype)))
    optimizer = optimizer_of(parameter, config)
    optimizer.backward((parameter.float() * float("inf")).sum())
    norm = optimizer.clip()
    assert norm == float("inf")
    assert not skip_update([(optimizer, norm)])
    assert optimizer.loss_scale == 1.0


def test_a_shared_scale_is_one_scale_and_saved_once(tmp_path):
    policy, head = half_parameter(), torch.nn.Parameter(torch.ones(2))
    owner = optimizer_of(policy)
    sharing = PolicyOptimizer([("head", head)], HALF, 10, shares_scale_of=owner)
    owner.backward((policy.float() * 2.0**-20).sum() + (head * 3.0).sum())
    assert sharing.clip() == pytest.approx(3.0 * 2**0.5)
    assert owner.clip() == pytest.approx(2.0**-20 * 2**0.5)
    owner.step(0)
    sharing.step(0)
    assert skip_update([(owner, math.inf), (sharing, math.nan)])
    assert sharing.loss_scale == owner.loss_scale == FIRST_SCALE / 2
    owner.save(tmp_path / "owner")
    sharing.save(tmp_path / "sharing")
    resumed = optimizer_of(half_parameter())
    resumed.load(tmp_path / "owner")
    assert resumed.loss_scale == FIRST_SCALE / 2
    assert b"loss_scale" not in (tmp_path / "sharing").read_bytes()


def float16_trainee(kit, kind):
    """A float16 policy with a critic, and its config."""
    critic_config = CriticConfig(kind=kind, learning_rate=1e-2, value_clip=math.inf)
    config = kit.config({"advantage": "gae", "critic": critic_config}, {"dtype": "float16"})
    trainee = kit.trainee(kit.model(dtype="float16"), config)
    critic = ValueHead(32) if kind == "head" else SeparateCritic(kit.model(seed=4, dtype="float16").base_model)
    torch.nn.init.normal_(critic.output.weight, std=0.3)
    trainee.critic = critic
    trainee.critic_optimizer = build_critic_optimizer(critic, critic_config, config.learner, 100, trainee.optimizer)
    return trainee, config


@pytest.mark.parametrize(
    ("kind", "overflowing", "after"),
    [
        ("head", "policy", (2.0**59, 2.0**59)),
        ("separate", "policy", (2.0**59, 2.0**10)),
        ("separate", "critic", (2.0**10, 2.0**59)),
        ("separate", "both", (2.0**59, 2.0**59)),
    ],
)
def test_an_overflow_halves_the_scale_it_happened_under_once(kit, kind, overflowing, after):
    """Real float16 models; scales that are to overflow start at 2^60, others at 2^10."""
    trainee, config = float16_trainee(kit, kind)
    parts = {"policy": trainee.optimizer, "critic": trainee.critic_optimizer}
    for name, optimizer in parts.items():
        if kind == "separate" or name == "policy":
            optimizer.scale.value = 2.0**60 if overflowing in {name, "both"} else 2.0**10
    before = [parameter.detach().clone() for module in (trainee.model, trainee.critic) for parameter in module.parameters()]
    skipped = train_step(trainee, kit.batch(kit.samples(), 40), config)
    assert skipped.metrics["policy/skipped_updates"] == 1
    assert tuple(optimizer.loss_scale for optimizer in parts.values()) == after
    now = [parameter for module in (trainee.model, trainee.critic) for parameter in module.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, now, strict=True))
    for optimizer in parts.values():
        optimizer.scale.value = 2.0**10
    made = train_step(trainee, kit.batch(kit.samples(), 40, step=1), config)
    assert made.metrics["policy/skipped_updates"] == 0
    assert not any(torch.equal(old, new) for old, new in zip(before[:1] + before[-1:], now[:1] + now[-1:], strict=True))
