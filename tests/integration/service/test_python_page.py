"""The programs of docs/python.md: each is run as it stands, but for its config.

The first is run in session/test_notebook.py. What a type checker says of all is in run/test_wheel.py.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from asyncrl.config.load import load_config
from tests.integration.conftest import NO_EVALUATION, NO_MODELS, written
from tests.integration.run.test_docs import snippets

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "python.md"
PROGRAMS = [text for text in snippets(PAGE, "python") if "import" in text]
OFF = {**NO_EVALUATION, "model__warm_start": None}
SMALL = {"eval.at_start": False, "eval.at_end": False, "model.warm_start": None, "algorithm.groups_per_step": 2, "num_steps": 3}
"""Of the quickstart, which is what the programs name."""


def program(*words: str, config: object = "quickstart") -> dict[str, Any]:
    """The names that the one program with these words defines, with this config."""
    (text,) = [text for text in PROGRAMS if all(word in text for word in words)]
    names: dict[str, Any] = {"__name__": "program"}
    exec(text.replace('"quickstart"', repr(str(config))), names)
    return names


@pytest.fixture
def small(tmp_path):
    return written(load_config("quickstart", SMALL | {"folder": str(tmp_path)}), tmp_path / "small.toml")


async def test_a_loop_over_a_stream_trains_every_step(small, capsys):
    await program("asyncrl.Session", "stream")["main"](small)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "3"]


async def test_a_web_app_answers_and_trains_on_what_is_said_of_its_answers(small, capsys):
    names = program("aiohttp", config=small)
    async with TestClient(TestServer(names["make_app"]())) as client:
        # More than there are places for: those that nobody rates do not hold the others up.
        answers = [await (await client.post("/answer", data=f"{number}+1=")).json() for number in range(10, 20)]
        assert {len(one["answers"]) for one in answers} == {4}
        said = [{"id": one["id"], "rewards": [1.0, 0.0] * 2} for one in [*answers[:6], *answers[8:]]]
        assert [(await client.post("/rate", json=one)).status for one in said] == [410] * 6 + [200] * 2
        told = ""
        while "1 0.5" not in told:
            told += capsys.readouterr().out
            await asyncio.sleep(0.02)


async def test_a_study_is_submitted_and_waited_for(daemon, tiny, tmp_path, capsys):
    config = tiny(**OFF, **NO_MODELS, num_steps=2)
    server = await daemon.start()
    await program("asyncrl.Server")["main"](server._url, server._token, written(config, tmp_path / "c.toml"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all("done" in line for line in lines[:4])
    assert re.fullmatch(r"eta 0: 0\.\d+, p 1\.000 over 0 pairs", lines[4])
    assert re.fullmatch(r"eta 2: 0\.\d+, p (0\.5|1\.0)00 over 2 pairs", lines[5])
