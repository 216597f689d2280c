"""A page of a browser, and a daemon, for the tests that have one."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import asyncrl
from asyncrl.control.launch.processes import kill_controllers

pytest.register_assert_rewrite("tests.integration.service.browser")


@pytest.fixture
async def page() -> AsyncIterator[Any]:
    """A page of a browser of its own; see browser.py."""
    from tests.integration.service.browser import new_page

    async with new_page() as one:
        yield one


class Daemon:
    """`asyncrl serve`, and a client of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *options: str, **environment: str) -> asyncrl.Server:
        command = [sys.executable, "-m", "asyncrl", "serve", "--folder", str(self.folder), "--port", "0", *options]
        self.process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **environment})
        async with asyncio.timeout(120):
            while not (self.folder / "server.url").exists():
                assert self.process.returncode is None
                await asyncio.sleep(0.02)
        return asyncrl.Server((self.folder / "server.url").read_text(), (self.folder / "admin.token").read_text().strip())

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()
        (self.folder / "server.url").unlink()

    async def end(self) -> int:
        self.process.terminate()
        return await self.process.wait()


@pytest.fixture
async def daemon(tmp_path):
    one = Daemon(tmp_path / "served")
    yield one
    if one.process is not None and one.process.returncode is None:
        await one.end()
    for folder in tmp_path.glob("*/runs/*"):
        kill_controllers(folder)
