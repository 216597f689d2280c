"""Checkpoints as the controller sees them: asked of the learner, awaited by callers, known by folder and version.

Owns nothing on disk (learner/checkpoint.py does). Called by control/controller.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from asyncrl.control.peers import Peers
from asyncrl.errors import RunError
from asyncrl.schema.control import Checkpoint, CheckpointDone


class Checkpoints:
    """The newest checkpoint, and who waits for the next."""

    def __init__(self, peers: Peers) -> None:
        self.folder = ""
        """Of the newest complete one."""
        self.version = -1
        self._peers = peers
        self._waiters: list[asyncio.Future[str]] = []

    def ask(self, version: int) -> bool:
        """Ask the learner for a checkpoint of the version it holds, `version` or a little later; False where there is none."""
        learner = self._peers.get("learner")
        if learner is None:
            return False
        learner.tell(Checkpoint(version))
        return True

    async def wait_for_next(self, version: int) -> str:
        """Ask for a checkpoint and return its folder once it is complete.

        Raises:
            RunError: There is no learner, or it died over it.
        """
        if not self.ask(version):
            raise RunError("there is no learner that could write a checkpoint now")
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return await waiter

    def done(self, message: CheckpointDone) -> int:
        """Note a complete checkpoint; return the version of the oldest one kept, which no replay can go behind."""
        self.folder, self.version = message.folder, message.version
        for waiter in self._take_waiters():
            waiter.set_result(message.folder)
        return oldest_version(Path(message.folder).parent)

    def fail(self, reason: str) -> None:
        """Tell whoever waits that there will be none."""
        for waiter in self._take_waiters():
            waiter.set_exception(RunError(f"no checkpoint was written: {reason}"))

    def _take_waiters(self) -> list[asyncio.Future[str]]:
        waiting = [waiter for waiter in self._waiters if not waiter.done()]
        self._waiters.clear()
        return waiting


def oldest_version(folder: Path) -> int:
    """Return the version of the oldest checkpoint in `folder`, 0 where there is none."""
    numbers = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return min((int(number) for number in numbers if number.isdigit()), default=0)
