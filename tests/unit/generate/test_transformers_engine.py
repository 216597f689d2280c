"""The embedded engine's thread; what every engine promises is tests/contract/engines/test_engine.py."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.generate.transformers.engine import TransformersEngine
from tests.contract.engine_cases import make_model

CONFIG = TransformersEngineConfig(num_slots=2, max_sequence_tokens=32)


async def test_a_start_that_is_cancelled_at_any_point_leaves_no_thread(tmp_path):
    """An exception that ended it would be a warning, and so fail this."""
    make_model(0).save_pretrained(tmp_path)
    before = threading.enumerate()
    for delay_s in (0.0, 0.001, 0.01, 0.1):
        engine = TransformersEngine(CONFIG, tmp_path)
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(engine.start())
            await asyncio.sleep(delay_s)
            starting.cancel()
        with suppress(asyncio.CancelledError):
            starting.result()
            await engine.close()
        assert decoding(before) == []


def decoding(before: list[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "decode" and thread not in before]
