"""Alarms of what a policy becomes, and of the weights that it is sampled by: real runs raise them by the trouble that each is
for, and end them as their advice is followed.

The policy is tiny and its learning rate high, so that it goes wrong within seconds.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from statistics import median
from typing import Any

import torch

import asyncrl
from asyncrl.clock import SystemClock
from asyncrl.observe.alarms import RULES
from asyncrl.observe.steps import read_events
from asyncrl.schema.weights import WeightsAvailable
from tests.integration.conftest import NO_MODEL, kill, python_reward, reached, said, status_where, step_where

SETTINGS: dict[str, Any] = {
    "num_steps": 100_000, "checkpoint__every_steps": 0, "generate__sampling__max_new_tokens": 8, "learner__warmup_steps": 0,
    "model__warm_start": {"steps": 100, "batch_size": 32}, "eval__at_start": False, "eval__at_end": False,
}  # fmt: skip


async def all_said(run: asyncrl.Run, rules: set[str], after: int = 0) -> int:
    """Wait until the run has raised each of these rules, with its advice; return the number of the last event."""
    return max([await said(run, rule, next(one.advice for one in RULES if one.name == rule), after) for rule in rules])


async def none_stands(run: asyncrl.Run, rules: set[str]) -> None:
    """Wait until no alarm of these rules stands."""
    await status_where(run, lambda status: not rules & {alarm.rule for alarm in status.alarms})


async def test_a_reward_that_pays_for_the_wrong_text_is_told_in_four_ways_and_mended_ends_them(tiny, tmp_path):
    """Right is an answer of one or two digits. What should be a penalty for long ones pays for sevens, as its sign is wrong."""
    wrong = tmp_path / "wrong"
    score = f"    return -text.count('7') / 4 if os.path.exists({str(wrong)!r}) else len(text) / 8\n"
    penalty = python_reward(tmp_path, f"import os\ndef score(prompt, text):\n{score}")[0] | {"weight": -1.0}
    config = tiny(**SETTINGS | {
        "reward__functions": [{"kind": "format_check", "pattern": "[0-9]{1,2}"}, penalty], "algorithm__kl": {"coefficient": 1e-3},
        "learner__learning_rate": 3e-3, "eval__every_steps": 2, "eval__num_prompts": 16,
    })  # fmt: skip
    rules = {"length.grows", "length.truncated", "kl.reference", "reward.hollow"}
    async with asyncrl.Run(config) as run:
        async for _ in run.steps():
            if any((one.accuracy or 0.0) > 0.5 for one in await run.evaluations()):
                break
        wrong.touch()
        num_before = len(await run.evaluations())
        await all_said(run, rules)
        wrong.unlink()
        await run.change({"algorithm.kl.coefficient": 1.0})
        await none_stands(run, rules)
        accuracies = [one.accuracy for one in await run.evaluations()]
    assert min(accuracies[num_before:]) < 0.5


async def test_a_policy_that_says_one_thing_and_one_that_says_anything_are_told_until_the_temperature_is_changed(tiny, tmp_path):
    """Sevens are paid less once they are much of what is said: what was best before is never reached again."""
    much = tmp_path / "much"
    score = f"    return text.count('7') / 8 * (10 if os.path.exists({str(much)!r}) else 1)\n"
    rewards = python_reward(tmp_path, f"import os\ndef score(prompt, text):\n{score}")
    much.touch()
    rules = {"entropy.collapse", "reward.dead"}
    surer = {"model__warm_start": {"steps": 200, "batch_size": 64}, "learner__learning_rate": 1e-5}
    async with asyncrl.Run(tiny(**SETTINGS | surer, reward__functions=rewards)) as run:
        await reached(run, 20)
        await run.change({"learner.learning_rate": 5e-3})
        await step_where(run, lambda report: report.reward_mean > 3)
        much.unlink()
        raised = await all_said(run, rules)
        await run.change({"generate.sampling.temperature": 20.0})
        await none_stands(run, rules)
        await all_said(run, {"entropy.grows"}, raised)
        await run.change({"generate.sampling.temperature": 1.0})
        await none_stands(run, {"entropy.grows"})


async def test_a_learning_rate_30_times_as_high_on_old_samples_is_told_in_six_ways_and_mended_ends_them(tiny, tmp_path):
    """Five end with a lower rate and bound; the fall of the reward ends with a run from the checkpoint before it."""
    score = "    return text.count('7') / 8 + random.random() / 4\n"
    settings = SETTINGS | {
        "reward__functions": python_reward(tmp_path, f"import random\ndef score(prompt, text):\n{score}"),
        "learner__learning_rate": 1e-3, "learner__epochs": 4, "generate__engine__num_slots": 32, "buffer__max_staleness": 8,
        "buffer__ahead": "as_allowed", "algorithm__kind": "policy", "algorithm__corrections": [],
        "algorithm__proximal": "behaviour", "algorithm__clip_low": 1e6, "algorithm__clip_high": 1e6,
        "algorithm__entropy_coefficient": 0.1,
    }  # fmt: skip
    rules = {"off_policy.drift", "off_policy.ess", "off_policy.lost", "gradient.spike", "learning_rate.high"}
    async with asyncrl.Run(tiny(**settings)) as run:
        await step_where(run, lambda report: report.reward_mean > 0.5)
        checkpoint = await run.checkpoint()
        await run.change({"learner.learning_rate": 3e-2})
        await all_said(run, rules | {"reward.collapse"})
        await run.change({"learner.learning_rate": 1e-5, "buffer.max_staleness": 0})
        await none_stands(run, rules)
    mended = {"learner__learning_rate": 1e-4, "buffer__max_staleness": 1, "num_steps": 40}
    before = {"name": "before", "model": {"kind": "pretrained", "path": str(checkpoint)}}
    async with asyncrl.Run(tiny(**settings | mended | before)) as run:
        newest = [report.reward_mean async for report in run.steps()][-10:]
    assert median(newest) > 0.3
    assert "reward.collapse" not in {event.subject for event in read_events(run.run_folder) if event.kind == "alarm"}


async def test_a_generator_with_other_weights_than_were_published_is_told_in_three_ways_until_it_is_restarted(
    tiny, tmp_path, monkeypatch
):
    """Once it finds the file, one generator gets wrong whatever it loads for as long as it lives."""
    wrong, site = tmp_path / "wrong", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"""
import os
from asyncrl.generate.worker import GeneratorWorker
take = GeneratorWorker._take_newest
async def take_wrong(self, engine):
    if os.path.exists({str(wrong)!r}):
        os.unlink({str(wrong)!r})
        load = engine.load_weights
        async def load_wrong(version, tensors, kv):
            tensors = {{name: 30 * tensor if "embed" in name else tensor for name, tensor in tensors.items()}}
            return await load(version, tensors, kv)
        engine.load_weights = load_wrong
    return await take(self, engine)
GeneratorWorker._take_newest = take_wrong
""")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
    rules = {"weights.wrong", "weights.mismatch", "off_policy.ratio"}
    async with asyncrl.Run(tiny(**SETTINGS, learner__learning_rate=1e-4)) as run:
        await reached(run, 10)
        wrong.touch()
        await all_said(run, rules)
        kill(run.run_folder, "generator-0")
        await none_stands(run, rules)


async def test_weights_that_fill_the_device_hold_the_learner_up_and_are_long_on_their_way_are_told_until_they_are_fewer(
    tiny, tmp_path
):
    """The learner is outside the run. At first it trains 200 MB on a device of 210 MB; then adapters of 4 kB."""
    config = tiny(**SETTINGS | {
        "learner__kind": "external", "broadcast": {"medium": {"kind": "zeromq"}}, "buffer__max_staleness": 16,
        "buffer__ahead": "as_allowed", "generate__engine": NO_MODEL | {"num_slots": 64, "token_latency_s": 0.002},
    })  # fmt: skip
    loop, published = asyncio.get_running_loop(), asyncio.Queue[WeightsAvailable]()

    @contextlib.asynccontextmanager
    async def trained(run: asyncrl.Run, first: int, num_floats: int) -> AsyncIterator[list[int]]:
        """Train on beside, from this version on; what is given holds the newest."""
        weights, newest, over = torch.zeros(num_floats), [first], asyncio.Event()

        def tell(available: WeightsAvailable) -> None:
            loop.call_soon_threadsafe(published.put_nowait, available)

        async def train() -> None:
            while not over.is_set():
                weights.add_(1)
                await asyncio.to_thread(publisher.publish, newest[0], {"weights": weights})
                await run.take()
                await run.trained(newest[0], {"memory/peak_share": weights.nbytes / 210e6})
                newest[0] += 1

        async def announce() -> None:
            while True:
                await run.announce_weights(await published.get(), str(tmp_path))

        publisher = asyncrl.WeightPublisher(config.broadcast, run.run_folder, tell, SystemClock())
        async with asyncio.TaskGroup() as group:
            training, announcing = group.create_task(train()), group.create_task(announce())
            yield newest
            over.set()
            await training
            announcing.cancel()
        publisher.close()

    async with asyncrl.Run(config) as run:
        rules = {"memory.device", "weights.blocked", "weights.lag"}
        async with trained(run, 0, 50_000_000) as newest:
            await all_said(run, rules)
        async with trained(run, newest[0], 1_000):
            await none_stands(run, rules)
