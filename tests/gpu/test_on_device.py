"""What only an accelerator can show: the device gives what the CPU gives. Reported as not run where there is none."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.clock import SystemClock
from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.config.load import parse_config
from asyncrl.learner.model.policy import made_ready
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.train_state import TrainState
from asyncrl.packing.pack import pack_step
from asyncrl.schema.samples import Prompt, ScoredGroup, ScoredSample
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.subscriber import Subscriber
from tests.builders import make_sample, until
from tests.contract.engine_cases import PROMPT, collect, make_request, transformers_engine


async def _generate(folder: Path, device: str) -> tuple[list[int], list[float]]:
    async with transformers_engine(folder, device=device) as engine:
        await engine.load_weights(0, AutoModelForCausalLM.from_pretrained(folder).state_dict(), "keep")
        made = await collect(engine.submit(make_request("r", 7, max_new_tokens=32, temperature=0.0)))
        return made.token_ids, [*made.logprobs, *await engine.score([*PROMPT, *made.token_ids])]


async def test_the_engine_on_a_device_agrees_with_the_cpu(model_folder):
    ids, logprobs = await _generate(model_folder, "cpu")
    device_ids, device_logprobs = await _generate(model_folder, "cuda")
    assert device_ids == ids
    assert device_logprobs == pytest.approx(logprobs, abs=1e-3)


def _batch():
    members = tuple(
        ScoredSample(make_sample(0, index, [8 + index, 9, 10], [5, 6, 7], [-2.0, -3.0, -4.0]), float(index % 2))
        for index in range(4)
    )
    return pack_step(0, [ScoredGroup(0, Prompt("p"), members)], tokens_per_row=64, temperature=1.0)


def _moved(folder: Path, device: str) -> dict[str, torch.Tensor]:
    """How far a step moves the weights: about their gradients, by Adam with so large an epsilon."""
    config = parse_config({"learner": {"device": device, "learning_rate": 1.0, "epsilon": 1.0, "warmup_steps": 0}})
    model = made_ready(AutoModelForCausalLM.from_pretrained(folder).to(device), config.learner)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train_step(TrainState(model, PolicyOptimizer(model.named_parameters(), config.learner, 10)), _batch(), config)
    return {name: (parameter.detach() - before[name]).cpu() for name, parameter in model.named_parameters()}


def test_a_step_on_a_device_agrees_with_the_cpu(model_folder):
    on_cpu, on_device = _moved(model_folder, "cpu"), _moved(model_folder, "cuda")
    for name, moved in on_cpu.items():
        assert (on_device[name] - moved).norm() < 1e-2 * moved.norm(), name


@pytest.mark.parametrize("medium", ["shared_memory", "files", "zeromq"])
async def test_weights_leave_a_device_whole(model_folder, tmp_path, medium):
    import msgspec

    config = msgspec.convert({"medium": {"kind": medium}}, BroadcastConfig)
    model = AutoModelForCausalLM.from_pretrained(model_folder).to("cuda")
    announced = []
    publisher, subscriber = Publisher(config, tmp_path, announced.append, SystemClock()), Subscriber(config, tmp_path)
    try:
        publisher.publish(0, dict(model.named_parameters()))
        await until(lambda: announced)
        tensors = await subscriber.fetch(announced[0])
        for name, parameter in model.named_parameters():
            assert torch.equal(tensors[name], parameter.detach().cpu()), name
    finally:
        subscriber.close()
        publisher.close()
