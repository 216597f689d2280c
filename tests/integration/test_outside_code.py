"""Outside code: a learner of one's own, samples of one's own, on fake engines without torch."""

from __future__ import annotations

import asyncio

import pytest

import asyncrl
from asyncrl.clock import SystemClock
from asyncrl.schema.samples import ids_to_bytes, logprobs_to_bytes

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def outside(tiny):
    """A run without torch: fake generators, a learner outside."""

    def make(**overrides):
        settings = {
            "learner__kind": "external",
            "generate__engine": {"kind": "fake", "num_slots": 16, "mean_tokens": 8.0, "max_sequence_tokens": 128},
            "generate__sampling__max_new_tokens": 100,
            "packing__tokens_per_row": 256,
            "eval__at_start": False,
            "eval__at_end": False,
        }
        return tiny(**(settings | overrides))

    return make


def _available(version: int) -> asyncrl.WeightsAvailable:
    return asyncrl.WeightsAvailable(version, "none", "", asyncrl.WeightsManifest((), 0), "", SystemClock().now())


async def test_an_outside_learner_takes_every_step_and_none_is_too_old(outside):
    config = outside(num_steps=6)
    async with asyncrl.Run(config) as run:
        await run.announce_weights(_available(0), "nothing-to-load")
        seen = set()
        for step in range(6):
            taken = await run.take()
            assert taken.step == step
            assert len(taken.groups) == config.algorithm.groups_per_step
            for group in taken.groups:
                assert group.group_id not in seen
                seen.add(group.group_id)
                for member in group.members:
                    oldest = min(memoryview(member.sample.versions).cast("i"))
                    assert step - oldest <= config.buffer.max_staleness
            await run.announce_weights(_available(step + 1))
            await run.trained(step, {"reward/mean": 0.5})
        reports = [report async for report in run.steps()]
        status = await run.status()
    assert [report.version for report in reports] == [1, 2, 3, 4, 5, 6]
    assert status.phase == "stopped", status.reason
    assert status.groups["trained"] == len(seen)


async def test_samples_generated_outside_are_checked_scored_and_trained(outside):
    prompt = asyncrl.Prompt("mine/1", text="1+1=", answer="2")
    config = outside(generate__num_workers=0, algorithm__groups_per_step=1, algorithm__group_size=2, num_steps=1)

    def sample(index: int, text: str, *, logprob: float = -0.5) -> asyncrl.Sample:
        return asyncrl.Sample(
            0, index, 0, ids_to_bytes([5, 6]), ids_to_bytes([7]), logprobs_to_bytes([logprob]), ids_to_bytes([0]),
            "stop", text, "my-generator", 0.0, 1.0,
        )  # fmt: skip

    async with asyncrl.Run(config) as run:
        bad = await run.submit(asyncrl.ExternalGroup(prompt, (sample(0, "2"), sample(1, "3", logprob=float("nan")))))
        assert "my-generator" in bad.refused
        good = await run.submit(asyncrl.ExternalGroup(prompt, (sample(0, "2"), sample(1, "3"))))
        assert good.refused == ""
        taken = await asyncio.wait_for(run.take(), 30)
        assert [member.reward for member in taken.groups[0].members] == [1.0, 0.0]
        assert taken.groups[0].group_id == good.group_id
        await run.trained(0)
        status = await run.status()
    assert status.refused_samples == 2
    assert status.groups["trained"] == 1
