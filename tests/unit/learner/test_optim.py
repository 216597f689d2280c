import pytest
import torch

from asyncrl.config.algorithm import LearnerConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.optim import PolicyOptimizer, learning_rate_at
from asyncrl.learner.rows import prepare
from asyncrl.learner.step import train_step
from asyncrl.learner.trainee import Trainee


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_state_goes_on_to_the_same_bits(kit, tmp_path, dtype):
    config = kit.config({}, {"dtype": dtype, "weight_decay": 0.1})
    whole = kit.model(dtype=dtype)
    optimizer = kit.optimizer(whole, config)
    for step in range(4):
        if step == 2:
            optimizer.save(tmp_path / "optimizer.safetensors")
            halfway = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
        train_step(Trainee(whole, optimizer), prepare(kit.batch(kit.samples(seed=step), step=step)), config)
    resumed = kit.model(seed=9, dtype=dtype)
    resumed.load_state_dict(halfway)
    again = kit.optimizer(resumed, config)
    again.load(tmp_path / "optimizer.safetensors")
    for step in (2, 3):
        train_step(Trainee(resumed, again), prepare(kit.batch(kit.samples(seed=step), step=step)), config)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


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
