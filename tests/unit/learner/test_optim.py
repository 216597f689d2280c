import sys

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.algorithm import LearnerConfig
from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learner.masters import HostGradients, Master, buckets_of
from asyncrl.learner.optim import PolicyOptimizer, learning_rate_at
from asyncrl.learner.rows import prepare
from asyncrl.learner.step import train_step
from asyncrl.learner.trainee import Trainee

EIGHT_BIT_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
"""Matrices large enough (4,096 elements) that bitsandbytes keeps their moments in 8 bits."""


def test_learning_rate_rises_linearly_then_stays():
    config = LearnerConfig(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate_at(step, config, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_learning_rate_falls_along_a_cosine_to_its_floor():
    config = LearnerConfig(learning_rate=1.0, warmup_steps=2, min_learning_rate_ratio=0.1)
    rates = [learning_rate_at(step, config, 10) for step in range(12)]
    assert rates[2] == 1.0
    assert rates[9] == pytest.approx(0.1)
    assert rates[11] == pytest.approx(0.1)
    assert rates[2:10] == sorted(rates[2:10], reverse=True)


def test_no_warmup_starts_at_the_full_rate():
    assert learning_rate_at(0, LearnerConfig(learning_rate=0.5, warmup_steps=0), 1) == 0.5


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("offload", [False, True])
def test_saved_state_goes_on_to_the_same_bits(kit, tmp_path, dtype, optimizer, offload):
    config = kit.config({}, {"dtype": dtype, "weight_decay": 0.1, "optimizer": optimizer, "offload_optimizer": offload})
    whole = kit.model(dtype=dtype, **EIGHT_BIT_SIZES)
    stepper = kit.optimizer(whole, config)
    for step in range(4):
        if step == 2:
            stepper.save(tmp_path / "optimizer.safetensors")
            halfway = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
        train_step(Trainee(whole, stepper), prepare(kit.batch(kit.samples(seed=step), step=step)), config)
    resumed = kit.model(seed=9, dtype=dtype, **EIGHT_BIT_SIZES)
    resumed.load_state_dict(halfway)
    again = kit.optimizer(resumed, config)
    again.load(tmp_path / "optimizer.safetensors")
    for step in (2, 3):
        train_step(Trainee(resumed, again), prepare(kit.batch(kit.samples(seed=step), step=step)), config)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert any(not torch.equal(a, halfway[name]) for name, a in whole.named_parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_where_the_optimizer_s_memory_is_changes_no_bit(kit, dtype, optimizer):
    weights = []
    for offload in (False, True):
        config = kit.config({}, {"dtype": dtype, "weight_decay": 0.1, "optimizer": optimizer, "offload_optimizer": offload})
        model = kit.model(dtype=dtype, **EIGHT_BIT_SIZES)
        stepper = kit.optimizer(model, config)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(3):
            train_step(Trainee(model, stepper), prepare(kit.batch(kit.samples(seed=step), 30, step=step)), config)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(weights[0], before, strict=True))


@pytest.mark.parametrize("bucket_elements", [1, 10, 25, 1000])
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
            train_step(Trainee(model, stepper), prepare(kit.batch(kit.samples(seed=step), step=step)), config)
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
    train_step(Trainee(model, stepper), prepare(kit.batch(kit.samples())), config)
    stepper.save(tmp_path / "state.safetensors")
    other = kit.optimizer(kit.model(**EIGHT_BIT_SIZES), kit.config({}, {"optimizer": (names - {saved_by}).pop()}))
    with pytest.raises(LearnerError, match="not the optimizer state of this model"):
        other.load(tmp_path / "state.safetensors")


def test_a_paged_optimizer_is_refused_on_a_cpu(kit):
    with pytest.raises(ConfigError, match=r"pages on CUDA only: on a CPU take 'adamw_8bit'"):
        kit.optimizer(kit.model(), kit.config({}, {"optimizer": "paged_adamw_8bit"}))


def test_a_missing_library_is_named_with_its_extra(kit, monkeypatch):
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes: pip install 'asyncrl\[lowbit\]'"):
        kit.optimizer(kit.model(), kit.config({}, {"optimizer": "adamw_8bit"}))


def test_state_of_another_model_is_refused(kit, tmp_path):
    config, model = kit.config(), kit.model()
    optimizer = kit.optimizer(model, config)
    train_step(Trainee(model, optimizer), prepare(kit.batch(kit.samples())), config)
    optimizer.save(tmp_path / "state.safetensors")
    with pytest.raises(LearnerError, match="not the optimizer state of this model"):
        kit.optimizer(kit.model(hidden_size=16), config).load(tmp_path / "state.safetensors")


def test_weight_decay_leaves_vectors_alone():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = PolicyOptimizer(
        [("matrix", matrix), ("vector", vector)], LearnerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5), 1
    )
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step(0)
    assert torch.all(matrix < 1)
    assert torch.equal(vector, torch.ones(2))
