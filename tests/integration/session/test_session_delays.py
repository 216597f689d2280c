"""A caller of a session that dawdles and trains in any order: the bound holds, and what came too late is named."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

import asyncrl
from asyncrl.observe.steps import read_steps
from tests.integration.conftest import NO_EVALUATION, NO_MODEL, assert_balanced

ETA, STEP = 2, 4
SEEDS, STEPS = (28, 29, 30), 10
"""Of the delays, one after the other in one session; and steps by each."""
PLACES = (ETA + 1) * STEP


def oldest(group: asyncrl.ScoredGroup) -> int:
    return min(int(asyncrl.ids_from_bytes(member.sample.versions).min()) for member in group.members)


async def test_nothing_older_than_the_bound_is_trained_whatever_the_delays(tiny):
    engine = {**NO_MODEL, "token_latency_s": 0.002}
    settings = {"model__warm_start": None, "buffer__max_staleness": ETA, "generate__engine": engine}
    config = tiny(num_steps=STEPS * len(SEEDS), **NO_EVALUATION, **settings)
    held, ages, late = list[asyncrl.ScoredGroup](), [], 0
    draws = [random.Random(seed) for seed in SEEDS]
    async with asyncrl.Session(config, reward=lambda _, text: float(len(text))) as session:
        while session.version < config.num_steps:
            draw = draws[session.version // STEPS]
            await asyncio.sleep(draw.choice([0.0, 0.0, 0.01, 0.05]))
            if len(held) < STEP or draw.random() < 0.5:
                places = min(PLACES, STEP * (config.num_steps - session.version))
                count = draw.randint(0, max(places - len(held), 0))
                held += await session.generate([f"{draw.randrange(10)}+1=" for _ in range(count)])
            draw.shuffle(held)
            if len(held) < STEP:
                continue
            batch, version = held[:STEP], session.version
            too_late = {group.group_id: oldest(group) for group in batch if version - oldest(group) > ETA}
            if too_late:
                with pytest.raises(asyncrl.RunError) as refused:
                    await session.train_step(batch)
                told = [rf"group {one} .*oldest token is of version {age}\b" for one, age in too_late.items()]
                assert any(re.search(pattern, str(refused.value)) for pattern in told), refused.value
                assert session.version == version
                late += len(too_late)
                await session.release([group for group in batch if group.group_id in too_late])
                held = [group for group in held if group.group_id not in too_late]
            else:
                await session.train_step(batch)
                ages += [version - oldest(group) for group in batch]
                held = held[STEP:]
        assert_balanced(status := await session.run.status())
    assert status.groups["trained"] == STEP * config.num_steps
    assert max(ages) == ETA
    assert late > 0
    assert max(step.staleness_max for step in read_steps(session.run.run_folder)) == ETA
