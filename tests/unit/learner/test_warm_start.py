import torch

from asyncrl.config.algorithm import LearnerConfig
from asyncrl.config.model import ScratchModel, WarmStart
from asyncrl.config.tasks import AdditionTask
from asyncrl.learner.model import build_scratch, made_ready
from asyncrl.learner.warm_start import tokenise, warm_start
from asyncrl.tasks.registry import build_task


def started(until_accuracy, steps=200):
    torch.set_num_threads(1)
    task = build_task(AdditionTask(digits=1, held_out=20), 0)
    model, tokenizer = build_scratch(ScratchModel(hidden_size=32, num_layers=1, num_heads=2), task.alphabet, 0)
    config = WarmStart(steps=steps, batch_size=16, learning_rate=5e-3, until_accuracy=until_accuracy)
    return warm_start(made_ready(model, LearnerConfig()), tokenise(task.worked_examples, tokenizer), config, LearnerConfig(), 0)


def test_a_warm_start_ends_at_the_accuracy_it_was_asked_for():
    metrics = started(0.2)
    assert metrics["warm_start/steps"] < 200
    assert 0.2 <= metrics["warm_start/accuracy"] < 0.4


def test_without_a_wanted_accuracy_every_step_is_taken():
    assert started(0.0, steps=12)["warm_start/steps"] == 12


def test_an_accuracy_out_of_reach_ends_at_the_last_step():
    assert started(1.0, steps=12)["warm_start/steps"] == 12
