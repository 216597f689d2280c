import gc
import math
import weakref
from functools import partial

import pytest
import torch

from asyncrl.config.algorithm import CriticConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.optim import optimizer as optim
from asyncrl.learner.optim.master_weights import buckets_of, spread
from asyncrl.learner.step.train_step import train_step

EIGHT_BIT_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
"""Matrices large enough (4,096 elements) that bitsandbytes keeps their moments in 8 bits."""


def test_learning_rate_rises_linearly_and_stays_or_falls_along_a_cosine_to_its_floor():
    config = LearnerConfig(learning_rate=1.0, warmup_steps=4)
    assert [optim.learning_rate_at(step, config, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    falling = LearnerConfig(learning_rate=1.0, warmup_steps=2, min_learning_rate_ratio=0.1)
    rates = [optim.learning_rate_at(step, falling, 10) for step in range(12)]
    assert rates[2:10] == sorted(rates[2:10], reverse=True)
    assert [rates[2], rates[9], rates[11]] == pytest.approx([1.0, 0.1, 0.1])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_the_first_step_of_a_warm_up_tells_how_far_one_at_its_end_would_move_the_weights(dtype, tolerance):
    """AdamW's first step moves every weight by the rate, whatever the gradients are."""
    matrix, bias = (torch.nn.Parameter(torch.full(shape, 0.5, dtype=getattr(torch, dtype))) for shape in ((50, 60), (3,)))
    config = LearnerConfig(learning_rate=0.05, warmup_steps=20, dtype=dtype)
    optimizer = optim.PolicyOptimizer([("matrix", matrix), ("bias", bias)], config, 100)
    optimizer.backward((matrix.float() ** 3).sum() - bias.float().sum())
    optimizer.clip()
    assert optimizer.step(0) == pytest.approx(0.05 / 20)
    assert optimizer.relative_update == pytest.approx(0.05 / 0.5, rel=tolerance)


@pytest.mark.parametrize(("optimizer", "dtype"), [("adamw", "bfloat16"), ("adamw_8bit", "float32")])
def test_where_the_optimizer_s_memory_is_changes_no_bit(kit, monkeypatch, dtype, optimizer):
    """Nor do the buckets in which gradients come over, or a parameter without one."""
    models = []
    for offload, bucket_elements in ((False, 0), (True, 1 << 24), (True, 5000)):
        monkeypatch.setattr(optim, "buckets_of", partial(buckets_of, bucket_elements=bucket_elements))
        config = kit.config({}, {"dtype": dtype, "weight_decay": 0.1, "optimizer": optimizer, "offload_optimizer": offload})
        models.append(kit.model(dtype=dtype, **EIGHT_BIT_SIZES))
        models[-1].unused = torch.nn.Parameter(torch.ones(7, dtype=getattr(torch, dtype)))
        train_state, before = kit.train_state(models[-1], config), kit.bits(models[-1])
        for step in range(3):
            train_step(train_state, kit.batch(kit.samples(seed=step), 30, step=step), config)
    assert kit.same(models[0].parameters(), models[1].parameters())
    assert kit.same(models[0].parameters(), models[2].parameters())
    assert not kit.same(models[0].parameters(), before)


def test_eight_bit_moments_step_nearly_as_adamw(kit):
    changes, name = {}, "model.layers.0.self_attn.q_proj.weight"
    for optimizer in ("adamw", "adamw_8bit"):
        config = kit.config({}, {"optimizer": optimizer, "learning_rate": 1e-3, "warmup_steps": 0})
        model = kit.model(**EIGHT_BIT_SIZES)
        train_state, before = kit.train_state(model, config), model.get_parameter(name).detach().clone()
        for step in range(3):
            train_step(train_state, kit.batch(kit.samples(seed=step), step=step), config)
        changes[optimizer] = (model.get_parameter(name).detach() - before).flatten()
    assert torch.nn.functional.cosine_similarity(changes["adamw"], changes["adamw_8bit"], dim=0) > 0.99
    assert not torch.equal(changes["adamw"], changes["adamw_8bit"])


def test_bfloat16_learns_updates_smaller_than_its_own_step():
    """Between 0.5 and 1 the step of bfloat16 is 1 / 256; an update of 1e-3 would round to nothing."""
    parameter = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    config = LearnerConfig(dtype="bfloat16", learning_rate=1e-3, warmup_steps=0, max_grad_norm=1e9)
    optimizer = optim.PolicyOptimizer([("p", parameter)], config, 10)
    for step in range(8):
        optimizer.backward(parameter.float().sum())
        optimizer.clip()
        optimizer.step(step)
    assert parameter.dtype == torch.bfloat16
    assert parameter.item() == pytest.approx(1 - 8e-3, abs=1 / 500)


def test_gradients_too_small_for_float16_reach_the_weights():
    parameter, factor = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float16)), 2.0**-27
    optimizer = optim.PolicyOptimizer([("p", parameter)], LearnerConfig(dtype="float16", max_grad_norm=1e9), 10)
    (parameter.float() * factor).sum().backward()
    assert optimizer.clip() == 0, "without scaling they are lost"
    optimizer.backward((parameter.float() * factor).sum())
    assert optimizer.clip() == pytest.approx(factor * 2**0.5)


@pytest.mark.parametrize(("kind", "overflowing", "after"), [
    ("head", "policy", (59, 59)),
    ("separate", "critic", (10, 59)),
    ("separate", "both", (59, 59)),
])  # fmt: skip
def test_an_overflow_halves_the_scale_it_happened_under_once(kit, kind, overflowing, after):
    """Real float16 models; scales that are to overflow start at 2^60, others at 2^10."""
    critic = CriticConfig(kind=kind, learning_rate=1e-2, value_clip=math.inf)
    config = kit.config({"advantage": "gae", "critic": critic}, {"dtype": "float16"})
    train_state = kit.train_state(kit.model(dtype="float16"), config, kit.critic(kind, "float16"))
    parts = {"policy": train_state.optimizer, "critic": train_state.critic_optimizer}
    for name, optimizer in parts.items():
        if kind == "separate" or name == "policy":
            optimizer.scale.value = 2.0**60 if overflowing in {name, "both"} else 2.0**10
    now = [parameter for module in (train_state.model, train_state.critic) for parameter in module.parameters()]
    before = [parameter.detach().clone() for parameter in now]
    skipped = train_step(train_state, kit.batch(kit.samples(), 40), config)
    assert (skipped.metrics["policy/skipped_updates"], skipped.metrics["policy/updates"]) == (1, 0)
    assert tuple(math.log2(optimizer.scale.value) for optimizer in parts.values()) == after
    assert kit.same(before, now)
    for optimizer in parts.values():
        optimizer.scale.value = 2.0**10
    made = train_step(train_state, kit.batch(kit.samples(), 40, step=1), config)
    assert (made.metrics["policy/skipped_updates"], made.metrics["policy/updates"]) == (0, 1)
    assert made.metrics["policy/relative_update"] > 0
    for optimizer in parts.values():
        optimizer.scale.value = 2.0**60
    again = train_step(train_state, kit.batch(kit.samples(), 40, step=2), config)
    assert (again.metrics["policy/updates"], again.metrics["policy/relative_update"]) == (0, 0)
    assert not any(torch.equal(old, new) for old, new in zip(before[:1] + before[-1:], now[:1] + now[-1:], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_begin_within_what_rounds_to_their_weights_and_small_updates_show_in_the_mean(dtype):
    torch.manual_seed(0)
    weights = (torch.randn(500, 400) * 0.05).to(dtype)
    weights[0], weights[1] = 0.0, 2.0**-4
    masters = spread(weights, "weight")
    assert torch.equal(masters.to(dtype), weights)
    assert torch.equal(masters, spread(weights, "weight"))
    assert not torch.equal(masters, spread(weights, "another"))
    update = 1e-5  # of a weight of 0.05 one step is 2.4e-4 in bfloat16
    change = ((masters + update).to(dtype).float() - weights.float()).mean().item()
    assert change == pytest.approx(update, rel=0.05)


def test_an_optimizer_of_16_bit_weights_and_its_model_are_freed_when_nothing_holds_them():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = optim.PolicyOptimizer([("p", parameter)], LearnerConfig(dtype="bfloat16"), 10)
    optimizer.backward(parameter.float().sum())
    held = [weakref.ref(parameter), *(weakref.ref(tensor) for _, tensor in optimizer.state_tensors())]
    del parameter, optimizer
    gc.collect()
    assert [one() for one in held] == [None, None]
