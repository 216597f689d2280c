"""The programs of docs/python.md: each is run as it stands, but for its config, and passes `mypy --strict`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from asyncrl.config.load import dump_config
from tests.integration.conftest import NO_MODEL
from tests.integration.test_serve import daemon  # noqa: F401 - a fixture

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
PROGRAMS = [
    text for text in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL) if "import" in text
]
OFF = {"eval__at_start": False, "eval__at_end": False, "model__warm_start": None}
pytestmark = pytest.mark.timeout(300)


def program(*words: str, config: str = "quickstart") -> dict[str, Any]:
    """The names that the one program with these words defines, with this config."""
    (text,) = [text for text in PROGRAMS if all(word in text for word in words)]
    names: dict[str, Any] = {"__name__": "program"}
    exec(text.replace('"quickstart"', repr(config)), names)
    return names


def written(config: Any, path: Path) -> str:
    path.write_text(dump_config(config))
    return str(path)


def test_there_are_four_programs_and_their_types_hold_strictly(tmp_path):
    assert len(PROGRAMS) == 4
    for number, text in enumerate(PROGRAMS):
        (tmp_path / f"program_{number}.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), *tmp_path.glob("*.py")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


async def test_a_run_is_followed_and_changed(tiny, tmp_path, capsys):
    config = tiny(**OFF, num_steps=4, buffer__max_staleness=2, generate__engine=NO_MODEL)
    await program("asyncrl.Run")["main"](written(config, tmp_path / "c.toml"))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("change from step")]
    assert len([line for line in lines if not line.startswith(("change", "alarm"))]) == 5
    assert any(re.fullmatch(r"from step [234]", line) for line in lines)


async def test_a_loop_over_a_stream_trains_every_step(tiny, tmp_path, capsys):
    config = tiny(**OFF, num_steps=3, packing__tokens_per_row=512)
    await program("asyncrl.Session", "stream")["main"](written(config, tmp_path / "c.toml"))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "3"]


async def test_a_web_app_answers_and_trains_on_what_is_said_of_its_answers(tiny, tmp_path):
    config = tiny(**OFF, num_steps=3, algorithm__groups_per_step=2, algorithm__group_size=2)
    names = program("aiohttp", config=written(config, tmp_path / "c.toml"))
    async with TestClient(TestServer(names["make_app"]())) as client:
        for version in (1, 2):
            answers = [await (await client.post("/answer", data=f"{digit}+1=")).json() for digit in (1, 2)]
            assert [len(one["answers"]) for one in answers] == [2, 2]
            said = [await (await client.post("/rate", json={"id": one["id"], "rewards": [1.0, 0.0]})).json() for one in answers]
            assert [one["version"] for one in said] == [version - 1, version]


async def test_a_study_is_submitted_and_waited_for(daemon, tiny, tmp_path, capsys):  # noqa: F811 - the fixture
    config = tiny(**OFF, num_steps=2, generate__engine=NO_MODEL)
    server = await daemon.start()
    await program("asyncrl.Server")["main"](server._url, server._token, written(config, tmp_path / "c.toml"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all("done" in line for line in lines[:4])
    assert re.fullmatch(r"eta 0: 0\.\d+, p 1\.000 over 0 pairs", lines[4])
    assert re.fullmatch(r"eta 2: 0\.\d+, p (0\.5|1\.0)00 over 2 pairs", lines[5])
