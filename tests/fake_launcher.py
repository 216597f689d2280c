"""A launcher without processes: whoever holds it decides when each one exits."""

import asyncio
import itertools

from asyncrl.control.launch.processes import ProcessSpec


class FakeProcess:
    """A process that exits when told to; `terminate` and `kill` end it unless it is stubborn."""

    node = ""

    def __init__(self, spec: ProcessSpec, pid: int, *, ignores_terminate: bool) -> None:
        self.spec, self.pid, self.terminated, self._ignores_terminate = spec, pid, 0, ignores_terminate
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """Return whether it has not exited."""
        return not self._code.done()

    async def wait(self) -> int:
        """Return the exit code it was given."""
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        """Exit with -15, unless it ignores that."""
        self.terminated += 1
        if not self._ignores_terminate:
            self.exit(-15)

    def kill(self) -> None:
        """Exit with -9."""
        self.exit(-9)

    def exit(self, code: int) -> None:
        """End with this code; the first call counts."""
        if self.alive:
            self._code.set_result(code)


class FakeLauncher:
    """Keeps every process it was asked for, in order."""

    def __init__(self, *, ignores_terminate: bool = False) -> None:
        self.history: list[FakeProcess] = []
        self._ignores_terminate = ignores_terminate
        self._pids = itertools.count(1_000_001)
        self._changed = asyncio.Condition()

    async def start(self, spec: ProcessSpec) -> FakeProcess:
        """Start nothing and remember it; see `Launcher.start`."""
        process = FakeProcess(spec, next(self._pids), ignores_terminate=self._ignores_terminate)
        async with self._changed:
            self.history.append(process)
            self._changed.notify_all()
        return process

    async def started(self, name: str, incarnation: int = 1) -> FakeProcess:
        """Return that incarnation of `name`, waiting until it has been started."""

        def find() -> FakeProcess | None:
            matches = (item for item in self.history if item.spec.name == name and item.spec.incarnation == incarnation)
            return next(matches, None)

        async with self._changed:
            found = await self._changed.wait_for(find)
        assert found is not None
        return found

    @property
    def alive(self) -> list[str]:
        """Return the names of processes that have not exited."""
        return [process.spec.name for process in self.history if process.alive]
