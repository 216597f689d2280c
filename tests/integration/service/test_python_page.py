"""The programs of docs/python.md: each is run as it stands, but for its config, and passes `mypy --strict`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from asyncrl.config.load import load_config
from tests.integration.conftest import NO_EVALUATION, NO_MODEL, NO_MODELS, written
from tests.integration.run.test_docs import snippets
from tests.integration.service.test_serve import daemon  # noqa: F401 - a fixture

PAGE = Path(__file__).resolve().parents[3] / "docs" / "python.md"
PROGRAMS = [text for text in snippets(PAGE, "python") if "import" in text]
OFF = {**NO_EVALUATION, "model__warm_start": None}
SMALL = {"eval.at_start": False, "eval.at_end": False, "model.warm_start": None, "algorithm.groups_per_step": 2, "num_steps": 3}
"""Of the quickstart, which is what the programs name."""
pytestmark = pytest.mark.timeout(300)


def program(*words: str, config: object = "quickstart") -> dict[str, Any]:
    """The names that the one program with these words defines, with this config."""
    (text,) = [text for text in PROGRAMS if all(word in text for word in words)]
    names: dict[str, Any] = {"__name__": "program"}
    exec(text.replace('"quickstart"', repr(str(config))), names)
    return names


@pytest.fixture
def small(tmp_path):
    return written(load_config("quickstart", SMALL | {"folder": str(tmp_path)}), tmp_path / "small.toml")


def test_there_are_four_programs_and_their_types_hold_strictly(tmp_path):
    assert len(PROGRAMS) == 4
    for number, text in enumerate(PROGRAMS):
        (tmp_path / f"program_{number}.py").write_text(text)
    # Of what these programs do not touch nothing is read: a minute's work.
    untouched = "[mypy-torch.*,transformers.*,peft.*,safetensors.*,numpy.*,matplotlib.*]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = True\nfollow_imports = silent\n{untouched}")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", *tmp_path.glob("*.py")]
    environment = os.environ | {"MYPYPATH": str(PAGE.parents[1])}
    checked = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert checked.returncode == 0, checked.stdout


async def test_a_run_is_followed_and_changed(tiny, tmp_path, capsys):
    config = tiny(**OFF, **NO_MODELS, num_steps=4, buffer__max_staleness=2)
    await program("asyncrl.Run")["main"](written(config, tmp_path / "c.toml"))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("change from step")]
    assert len([line for line in lines if not line.startswith(("change", "alarm"))]) == 5
    assert any(re.fullmatch(r"from step [234]", line) for line in lines)


async def test_a_loop_over_a_stream_trains_every_step(small, capsys):
    await program("asyncrl.Session", "stream")["main"](small)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "3"]


async def test_a_web_app_answers_and_trains_on_what_is_said_of_its_answers(small):
    names = program("aiohttp", config=small)
    async with TestClient(TestServer(names["make_app"]())) as client:
        for version in (1, 2):
            # More than there are places for: those that nobody rates do not hold the others up.
            answers = [await (await client.post("/answer", data=f"{number}+1=")).json() for number in range(10, 20)]
            assert {len(one["answers"]) for one in answers} == {4}
            rated = [await client.post("/rate", json={"id": one["id"], "rewards": [1.0, 0.0] * 2}) for one in answers]
            assert [one.status for one in rated] == [404] * 8 + [200] * 2
            assert [(await one.json())["version"] for one in rated[8:]] == [version - 1, version]


async def test_a_study_is_submitted_and_waited_for(daemon, tiny, tmp_path, capsys):  # noqa: F811 - the fixture
    config = tiny(**OFF, num_steps=2, generate__engine=NO_MODEL)
    server = await daemon.start()
    await program("asyncrl.Server")["main"](server._url, server._token, written(config, tmp_path / "c.toml"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all("done" in line for line in lines[:4])
    assert re.fullmatch(r"eta 0: 0\.\d+, p 1\.000 over 0 pairs", lines[4])
    assert re.fullmatch(r"eta 2: 0\.\d+, p (0\.5|1\.0)00 over 2 pairs", lines[5])
