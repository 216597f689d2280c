"""Selection in real runs whose lengths have a long tail: none where steps wait, flagged where groups are dropped."""

from __future__ import annotations

import pytest

import asyncrl
from asyncrl.observe.steps import read_events

pytestmark = pytest.mark.timeout(240)
LONG_TAIL = {"kind": "fake", "num_slots": 24, "max_sequence_tokens": 256, "vocabulary_size": 8, "mean_tokens": 20.0, "sigma": 1.2,
             "token_latency_s": 0.01}  # fmt: skip


@pytest.mark.parametrize("policy", ["wait", "drop"])
async def test_a_long_tail_is_flat_under_wait_and_flagged_under_drop(tiny, policy):
    config = tiny(
        num_steps=40, generate__engine=LONG_TAIL, generate__sampling__max_new_tokens=240, model__max_positions=256,
        packing__tokens_per_row=1024, algorithm__groups_per_step=8, algorithm__group_size=2, buffer__policy=policy,
        buffer__max_staleness=1, eval__at_start=False, eval__at_end=False, checkpoint__every_steps=0,
    )  # fmt: skip
    async with asyncrl.Run(config) as run:
        last = [report async for report in run.steps()][-1].metrics
    alarms = [event.subject for event in read_events(run.run_folder) if event.kind == "alarm"]
    if policy == "wait":
        assert (last["bias/length_ratio"], last["bias/flagged"]) == (1.0, 0.0)
        assert "bias" not in alarms
    else:
        assert last["bias/lost/stale"] > 0
        assert last["bias/length_ratio_high"] < 0.95
        assert "bias" in alarms
