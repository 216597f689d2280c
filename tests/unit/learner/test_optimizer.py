import math

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.algorithm import CriticConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learner.model.critic import SeparateCritic, ValueHead, build_critic_optimizer
from asyncrl.learner.optim.master_weights import HostGradients, Master, buckets_of
from asyncrl.learner.optim.optimizer import (
    FIRST_SCALE,
    GROWTH_INTERVAL,
    SMALLEST_SCALE,
    LossScale,
    PolicyOptimizer,
    learning_rate_at,
)
from asyncrl.learner.step.microbatch import prepare
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.train_state import TrainState

EIGHT_BIT_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
"""Matrices large enough (4,096 elements) that bitsandbytes keeps their moments in 8 bits."""


def test_learning_rate_rises_linearly_and_stays_or_falls_along_a_cosine_to_its_floor():
    config = LearnerConfig(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate_at(step, config, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    falling = LearnerConfig(learning_rate=1.0, warmup_steps=2, min_learning_rate_ratio=0.1)
    rates = [learning_rate_at(step, falling, 10) for step in range(12)]
    assert rates[2:10] == sorted(rates[2:10], reverse=True)
    assert [rates[2], rates[9], rates[11]] == pytest.approx([1.0, 0.1, 0.1])


@pytest.mark.parametrize(
    ("optimizer", "dtype", "offload"),
    [("adamw", "float32", True), ("adamw", "bfloat16", False), ("adamw", "float16", False),
     ("adamw_8bit", "float32", False), ("adamw_8bit", "bfloat16", True)],
)  # fmt: skip
def test_saved_state_goes_on_to_the_same_bits(kit, tmp_path, dtype, optimizer, offload):
    config = kit.config({}, {"dtype": dtype, "weight_decay": 0.1, "optimizer": optimizer, "offload_optimizer": offload})
    whole = kit.model(dtype=dtype, **EIGHT_BIT_SIZES)
    stepper = kit.optimizer(whole, config)
    for step in range(4):
        if step == 2:
            stepper.save(tmp_path / "optimizer.safetensors")
            halfway = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
        train_step(TrainState(whole, stepper), prepare(kit.batch(kit.samples(seed=step), step=step)), config)
    resumed = kit.model(seed=9, dtype=dtype, **EIGHT_BIT_SIZES)
    resumed.load_state_dict(halfway)
    again = kit.optimizer(resumed, config)
    again.load(tmp_path / "optimizer.safetensors")
    for step in (2, 3):
        train_step(TrainState(resumed, again), prepare(kit.batch(kit.samples(seed=step), step=step)), config)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert any(not torch.equal(a, halfway[name]) for name, a in whole.named_parameters())


@pytest.mark.parametrize(("optimizer", "dtype"), [("adamw", "float16"), ("adamw", "bfloat16"), ("adamw_8bit", "float32")])
def test_where_the_optimizer_s_memory_is_changes_no_bit(kit, dtype, optimizer):
    weights = []
    for offload in (False, True):
        config = kit.config({}, {"dtype": dtype, "weight_decay": 0.1, "optimizer": optimizer, "offload_optimizer": offload})
        model = kit.model(dtype=dtype, **EIGHT_BIT_SIZES)
        stepper = kit.optimizer(model, config)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(3):
            train_step(TrainState(model, stepper), prepare(kit.batch(kit.samples(seed=step), 30, step=step)), config)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(weights[0], before, strict=True))


@pytest.mark.parametrize("bucket_elements", [1, 25])
def test_gradients_come_over_bucket_by_bucket(bucket_elements):
    sizes = [(3, 4), (7,), (2, 2), (30,), (1,)]
    masters = [Master(torch.nn.Parameter(torch.zeros(size)), on_host=True) for size in sizes]
    buckets = buckets_of(masters, bucket_elements)
    assert [master for bucket in buckets for master in bucket] == masters
    assert all(len(bucket) == 1 or sum(m.trained.numel() for m in bucket) <= bucket_elements for bucket in buckets)
    host = HostGradients(buckets)
    for turn in range(2):
        for number, master in enumerate(masters):
            master.parameter.grad = None if number == 1 else torch.full(sizes[number], 10.0 * turn + number)
        seen = []
        for index in host.arrivals():
            for master in buckets[index]:
                number = masters.index(master)
                seen.append(number)
                assert (master.trained.grad is None) == (number == 1)
                assert master.trained.grad is None or torch.equal(master.trained.grad, master.parameter.grad)
        assert seen == list(range(len(sizes)))
        assert all(master.trained.grad is None for master in masters)


def test_eight_bit_moments_take_a_byte_each_and_step_nearly_as_adamw(kit, tmp_path):
    weights = {}
    for optimizer in ("adamw", "adamw_8bit"):
        config = kit.config({}, {"optimizer": optimizer, "learning_rate": 1e-3, "warmup_steps": 0})
        model = kit.model(**EIGHT_BIT_SIZES)
        stepper = kit.optimizer(model, config)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for step in range(3):
            train_step(TrainState(model, stepper), prepare(kit.batch(kit.samples(seed=step), step=step)), config)
        stepper.save(tmp_path / optimizer)
        weights[optimizer] = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    saved, name = load_file(tmp_path / "adamw_8bit"), "model.layers.0.self_attn.q_proj.weight"
    assert saved[f"state1/{name}"].dtype == saved[f"state2/{name}"].dtype == torch.uint8
    assert saved[f"step/{name}"].item() == 3
    exact, rough = weights["adamw"][name].flatten(), weights["adamw_8bit"][name].flatten()
    assert torch.nn.functional.cosine_similarity(exact, rough, dim=0) > 0.99
    assert not torch.equal(exact, rough)


@pytest.mark.parametrize("saved_by", ["adamw", "adamw_8bit"])
def test_state_of_another_optimizer_is_refused(kit, tmp_path, saved_by):
    names = {"adamw", "adamw_8bit"}
    config = kit.config({}, {"optimizer": saved_by})
    model = kit.model(**EIGHT_BIT_SIZES)
    stepper = kit.optimizer(model, config)
    train_step(TrainState(model, stepper), prepare(kit.batch(kit.samples())), config)
    stepper.save(tmp_path / "state.safetensors")
    other = kit.optimizer(kit.model(**EIGHT_BIT_SIZES), kit.config({}, {"optimizer": (names - {saved_by}).pop()}))
    with pytest.raises(LearnerError, match="not the optimizer state of this model"):
        other.load(tmp_path / "state.safetensors")


def test_a_paged_optimizer_is_refused_on_a_cpu(kit):
    with pytest.raises(ConfigError, match=r"pages on CUDA only: on a CPU take 'adamw_8bit'"):
        kit.optimizer(kit.model(), kit.config({}, {"optimizer": "paged_adamw_8bit"}))


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
    while scale.shrink():
        assert scale.value >= SMALLEST_SCALE
    assert scale.value == SMALLEST_SCALE, "from here on an overflow is an error"


def test_gradients_too_small_for_float16_reach_the_weights():
    parameter, factor = half_parameter(), 2.0**-27
    optimizer = optimizer_of(parameter)
    optimizer.backward((parameter.float() * factor).sum())
    assert optimizer.clip() == pytest.approx(factor * 2**0.5)
    plain = half_parameter()
    (plain.float() * factor).sum().backward()
    assert torch.count_nonzero(plain.grad) == 0, "without scaling they are lost"


def float16_train_state(kit, kind):
    """A float16 policy with a critic, and its config."""
    critic_config = CriticConfig(kind=kind, learning_rate=1e-2, value_clip=math.inf)
    config = kit.config({"advantage": "gae", "critic": critic_config}, {"dtype": "float16"})
    train_state = kit.train_state(kit.model(dtype="float16"), config)
    critic = ValueHead(32) if kind == "head" else SeparateCritic(kit.model(seed=4, dtype="float16").base_model)
    torch.nn.init.normal_(critic.output.weight, std=0.3)
    train_state.critic = critic
    train_state.critic_optimizer = build_critic_optimizer(critic, critic_config, config.learner, 100, train_state.optimizer)
    return train_state, config


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
    train_state, config = float16_train_state(kit, kind)
    parts = {"policy": train_state.optimizer, "critic": train_state.critic_optimizer}
    for name, optimizer in parts.items():
        if kind == "separate" or name == "policy":
            optimizer.scale.value = 2.0**60 if overflowing in {name, "both"} else 2.0**10
    before = [
        parameter.detach().clone() for module in (train_state.model, train_state.critic) for parameter in module.parameters()
    ]
    skipped = train_step(train_state, kit.batch(kit.samples(), 40), config)
    assert skipped.metrics["policy/skipped_updates"] == 1
    assert tuple(optimizer.scale.value for optimizer in parts.values()) == after
    now = [parameter for module in (train_state.model, train_state.critic) for parameter in module.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, now, strict=True))
    for optimizer in parts.values():
        optimizer.scale.value = 2.0**10
    made = train_step(train_state, kit.batch(kit.samples(), 40, step=1), config)
    assert made.metrics["policy/skipped_updates"] == 0
    assert not any(torch.equal(old, new) for old, new in zip(before[:1] + before[-1:], now[:1] + now[-1:], strict=True))
