"""A loop of one's own over a session: real processes, the learner in this one."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

import asyncrl
from asyncrl.algorithms.losses import LOSSES
from asyncrl.buffer.ledger.reader import LedgerReader
from tests.integration.conftest import assert_balanced

pytestmark = pytest.mark.timeout(240)
OFF = {"eval__at_start": False, "eval__at_end": False}


def digest(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


async def test_a_synchronous_loop_over_a_session_is_the_run_s_own_bit_for_bit(tiny, tmp_path):
    settings = {**OFF, "buffer__max_staleness": 0, "num_steps": 4}
    async with asyncrl.Run(tiny(**settings, name="run")) as run:
        reports = [report async for report in run.steps()]
        status = await run.status()
    async with asyncrl.Session(tiny(**settings, name="session")) as session:
        steps = []
        async for taken in session.batches():
            samples = [member.sample for group in taken.groups for member in group.members]
            assert {version for sample in samples for version in asyncrl.ids_from_bytes(sample.versions)} == {taken.step}
            steps.append(await session.train_step(taken))
        model = digest(session.model)
        assert_balanced(await session.run.status())
    assert [step.metrics["reward/mean"] for step in steps] == [report.reward_mean for report in reports]
    theirs = AutoModelForCausalLM.from_pretrained(status.checkpoint).state_dict()
    assert all(torch.equal(model[name], theirs[name]) for name in theirs)


async def test_losses_rewards_and_prompts_of_the_caller_who_may_be_cancelled_and_call_again(tiny, tmp_path):
    judged, lost = [], []

    async def reward(prompt: asyncrl.Prompt, text: str) -> float:
        judged.append((prompt.text, prompt.answer))
        await asyncio.sleep(0)
        return float(len(text) % 2)

    def loss(inputs, config):
        lost.append(inputs.logprobs.shape)
        return LOSSES["reinforce"](inputs, config)

    prompts = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    config = tiny(**OFF, num_steps=4, model__warm_start=None)
    async with asyncrl.Session(config, prompts=prompts, reward=reward) as session:
        for what in (session.take, session.save):
            task = asyncio.get_running_loop().create_task(what())
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        taken = await session.take()
        assert {member.reward for group in taken.groups for member in group.members} <= {0.0, 1.0}
        with pytest.raises(asyncrl.RunError, match="not trained yet"):
            await session.take()
        first = await session.train_step(taken, loss=loss)
        assert await session.train_step(taken, loss=loss) is first  # a retry trains nothing
        taken = await session.take()
        with pytest.raises(asyncrl.AsyncRLError, match="rewards must be given"):
            await session.train_step(taken, rewards=[[1.0]])
        with pytest.raises(asyncrl.ConfigError, match=r"algorithm\.loss"):
            await session.train_step(taken, loss="nope")
        second = await session.train_step(taken, loss="cispo", learning_rate=5e-3)
        third = await session.train_step(await session.take())
        with pytest.raises(asyncrl.AsyncRLError, match="steps go in order"):
            await session.train_step(taken)
        saved = await session.save()
        folder = session.run.run_folder
    assert [step.version for step in (first, second, third)] == [1, 2, 3]
    assert len(lost) >= 1
    assert set(judged) <= {(one["prompt"], one["answer"]) for one in prompts}
    assert second.metrics["policy/learning_rate"] > 2 * first.metrics["policy/learning_rate"]
    assert saved.name == "step-000003"
    async with asyncrl.Session(resume=folder) as session:
        assert session.version == 3
        assert [(await session.train_step(taken)).version async for taken in session.batches()] == [4]
    with LedgerReader(folder) as ledger:
        assert {row.state: row.groups for row in ledger.counts()}["trained"] == 4 * 4


async def test_what_a_session_cannot_do_is_said():
    with pytest.raises(asyncrl.ConfigError, match="got neither"):
        asyncrl.Session()
    with pytest.raises(asyncrl.ConfigError, match=r"prompts\[0\]"):
        asyncrl.Session("quickstart", prompts=[{"question": "x"}])
    with pytest.raises(asyncrl.ConfigError, match="empty"):
        asyncrl.Session("quickstart", prompts=[])
    with pytest.raises(asyncrl.ConfigError, match=r"learner\.ranks = 1"):
        asyncrl.Session("quickstart", overrides=["learner.ranks=2"])
