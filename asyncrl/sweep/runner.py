"""Runs a sweep's cells, each an ordinary run in a folder of its own, and writes a line of results as each ends.

What a sweep knows lies in files: results.jsonl has the cells that are done, cells/ID/cell.json says of what settings and code one
that was begun is. So a sweep that was killed goes on: done cells are not run again, one that was begun is resumed as any run is.
A run that fails is a result with its fault. One that is lost (killed, no disk) is none: the sweep stops, and can be resumed.

Invariants: one sweep works on a folder at a time; a file of results has lines of one code and one settings of each cell.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from asyncrl.client import Run, is_live
from asyncrl.clock import Clock
from asyncrl.config.load import dump_config
from asyncrl.errors import ConfigError, LaunchError, RunError, RunLostError
from asyncrl.observe.steps import JsonLines, read_evals, read_steps
from asyncrl.sweep.grid import Cell, Sweep
from asyncrl.sweep.results import (
    CellResult,
    Code,
    Outcome,
    code_now,
    machine_now,
    measure_external,
    measure_run,
    read_results,
)

RESULTS_FILE = "results.jsonl"
CELL_FILE = "cell.json"
LOOK_S = 0.2
CONTROLLER_END_S = 60.0
"""For the controller of a run whose sweep was killed to be gone."""

Say = Callable[[str], None]


class Begun(msgspec.Struct, frozen=True):
    """A cell that was begun: cell.json in its folder."""

    settings: str
    code: Code
    starts_s: tuple[float, ...]
    """Clock seconds of each start of its run."""


class Standing(msgspec.Struct, frozen=True):
    """Where a sweep stands."""

    done: dict[str, CellResult]
    """By id of the cell."""
    begun: dict[str, Begun]
    """Those that are not done."""


def results_file(sweep: Sweep, given: Path | None) -> Path:
    """Return the file of results that is meant."""
    return given or sweep.folder / RESULTS_FILE


def standing(sweep: Sweep, results: Path) -> Standing:
    """Read where a sweep stands.

    Raises:
        ConfigError: What is there is of other settings, or of other code than the rest.
    """
    lines, done, begun = read_results(results), dict[str, CellResult](), dict[str, Begun]()
    by_name = {(cell.arm, cell.seed): cell for cell in sweep.cells}
    for line in lines:
        cell = by_name.get((line.arm, line.seed))
        if cell is None or line.settings != cell.settings:
            raise ConfigError(
                f"{results} has {line.arm} seed {line.seed} of other settings than the sweep's file says now; "
                "give other settings a file of their own: --results NAME.jsonl"
            )
        done[cell.id] = line
    for cell in sweep.cells:
        path = sweep.cells_folder / cell.id / CELL_FILE
        if cell.id in done or not path.exists():
            continue
        try:
            begun[cell.id] = msgspec.json.decode(path.read_bytes(), type=Begun)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is damaged ({error}); remove its folder, and the cell is run anew") from error
        if begun[cell.id].settings != cell.settings:
            raise ConfigError(f"{path.parent} was begun with other settings than the sweep's file says now; remove that folder")
    return Standing(done, begun)


def check_code(now: Standing, results: Path, folder: Path) -> None:
    """See to it that what comes is of the same code as what is there.

    Raises:
        ConfigError: It is not.
    """
    code = code_now()
    there = [(results, line.code) for line in now.done.values()] + [(folder / name, one.code) for name, one in now.begun.items()]
    for path, other in there:
        if other.files != code.files:
            raise ConfigError(
                f"{path} is of code {other.version} {other.commit} ({other.files}), this is {code.version} {code.commit} "
                f"({code.files}), and results of two codes are not mixed: go on with that code, or begin anew with "
                "--results NAME.jsonl and without the folder of cells"
            )


async def run_sweep(sweep: Sweep, results: Path, clock: Clock, say: Say, *, jobs: int = 1, resumed: bool = False) -> None:
    """Run every cell that is not done.

    Args:
        sweep: What to run.
        results: A line is appended as each cell ends.
        clock: Of the times that are noted.
        say: Is told of each cell.
        jobs: Cells beside each other.
        resumed: It may have been begun before.

    Raises:
        ConfigError: Results or cells that are there are of other code or settings, or another sweep works here.
        RunError: A run was lost, or ended before its goal; `asyncrl sweep resume` goes on.
    """
    sweep.cells_folder.mkdir(parents=True, exist_ok=True)
    with _locked(sweep.cells_folder) as lock:
        now = standing(sweep, results)
        if (now.done or now.begun) and not resumed:
            raise ConfigError(
                f"{results} has {len(now.done)} of {len(sweep.cells)} cells, {len(now.begun)} more were begun: "
                "`asyncrl sweep resume` goes on"
            )
        check_code(now, results, sweep.cells_folder)
        waiting = iter([cell for cell in sweep.cells if cell.id not in now.done])
        num_done, lines = len(now.done), JsonLines[CellResult](results)

        async def work() -> None:
            nonlocal num_done
            for cell in waiting:
                line = await _run_cell(cell, sweep, now.begun.get(cell.id), clock, jobs, lock)
                lines.write(line)
                num_done += 1
                say(f"{num_done}/{len(sweep.cells)} {_in_words(line)}")

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(jobs):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            lines.close()


async def _run_cell(cell: Cell, sweep: Sweep, begun: Begun | None, clock: Clock, jobs: int, lock: int) -> CellResult:
    folder = sweep.cells_folder / cell.id
    begun = begun or Begun(cell.settings, code_now(), ())
    if not cell.command and _has_ended(cell, folder):
        outcome = measure_run(folder, cell.config, sweep.plan, begun.starts_s)
    else:
        await _until_gone(folder, clock)
        begun = msgspec.structs.replace(begun, starts_s=(*begun.starts_s, clock.now()))
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f"{CELL_FILE}.partial"
        aside.write_bytes(msgspec.json.encode(begun))
        aside.replace(folder / CELL_FILE)
        if cell.command:
            outcome = await _run_command(cell, folder, sweep, lock)
        else:
            fault = await _run(cell, folder)
            outcome = measure_run(folder, cell.config, sweep.plan, begun.starts_s, fault)
    ended = datetime.fromtimestamp(clock.now(), UTC).isoformat(timespec="seconds")
    return CellResult(
        arm=cell.arm, seed=cell.seed, outcome=outcome, settings=cell.settings, code=begun.code, machine=machine_now(),
        attempts=max(len(begun.starts_s), 1), jobs=jobs, ended=ended, plan=sweep.plan,
    )  # fmt: skip


async def _run(cell: Cell, folder: Path) -> str:
    """Start a run, or resume it, and wait for its end; return why it failed."""
    run = Run(resume=folder) if (folder / "config.toml").exists() else Run(cell.config)
    try:
        async with run:
            status = await run.wait()
    except RunLostError:
        raise
    except RunError as error:
        return str(error) or "the run failed"
    if status.version < status.num_steps:
        raise RunError(f"{folder} ended before its goal ({status.reason or 'it was stopped'}); `asyncrl sweep resume` goes on")
    return ""


async def _run_command(cell: Cell, folder: Path, sweep: Sweep, lock: int) -> Outcome:
    """Run an external arm's command in the sweep's folder; it is begun anew where it was interrupted.

    It holds the lock too: where the sweep is killed and the command is not, no other sweep begins before that has ended.
    """
    (folder / "result.json").unlink(missing_ok=True)
    (folder / "base.toml").write_text(dump_config(cell.config), encoding="utf-8")
    command = [sys.executable if part == "python" else part for part in cell.command]
    for place, value in (("{config}", folder / "base.toml"), ("{seed}", cell.seed), ("{out}", folder)):
        command = [part.replace(place, str(value)) for part in command]
    with (folder / "command.log").open("wb") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, cwd=sweep.folder, stdout=output, stderr=output, pass_fds=(lock,)
            )
        except OSError as error:
            raise LaunchError(f"cannot start {json.dumps(command)} of {cell.arm}: {error.strerror}") from error
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if code:
        raise RunError(f"the command of {cell.arm} seed {cell.seed} ended with {code}; see {folder / 'command.log'}")
    return measure_external(folder / "result.json", cell.config, sweep.plan)


def _has_ended(cell: Cell, folder: Path) -> bool:
    """Return whether a run has done all that its config says: one whose sweep was killed just then is not started again."""
    steps, evals = read_steps(folder), read_evals(folder)
    judged = not cell.config.eval.at_end or (bool(evals) and evals[-1].version >= cell.config.num_steps)
    return bool(steps) and steps[-1].version >= cell.config.num_steps and judged


async def _until_gone(folder: Path, clock: Clock) -> None:
    """Wait for the controller of a run whose owner was killed: it ends by itself."""
    until_s = clock.now() + CONTROLLER_END_S
    while is_live(folder):
        if clock.now() > until_s:
            raise LaunchError(f"{folder} runs; `asyncrl drain {folder}` ends it")
        await clock.sleep(LOOK_S)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Hold a folder of cells; a killed sweep's hold ends with it."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another sweep works in {folder}; `asyncrl sweep status` shows how far it is") from error
        yield file.fileno()


def _in_words(line: CellResult) -> str:
    made, parts = line.outcome, [f"{line.arm} seed {line.seed}:"]
    parts += [f"FAILED ({made.fault})"] if made.fault else []
    parts += [f"accuracy {made.accuracy:.3f}"] if made.accuracy is not None else []
    parts += [f"reward {made.reward:.3f}"] if made.reward is not None else []
    parts += [f"bar after {made.seconds_to_bar:.1f} s"] if made.seconds_to_bar is not None else []
    return " ".join([*parts, f"({made.steps} steps in {made.train_s:.0f} s)"])


def status_text(sweep: Sweep, results: Path) -> str:
    """Return where every cell stands, an arm a line."""
    now, lines = standing(sweep, results), [f"{sweep.plan.name}: {len(sweep.plan.arms)} arms, {len(sweep.plan.seeds)} seeds"]
    width = max(len(arm) for arm in sweep.plan.arms)
    for arm in sweep.plan.arms:
        cells = [cell for cell in sweep.cells if cell.arm == arm]
        done = [now.done[cell.id] for cell in cells if cell.id in now.done]
        begun = [f"seed {cell.seed} at step {len(read_steps(sweep.cells_folder / cell.id))} of {cell.config.num_steps}"
                 for cell in cells if cell.id in now.begun]  # fmt: skip
        failed = sum(bool(line.outcome.fault) for line in done)
        told = [f"{len(done)}/{len(cells)} done", *([f"{failed} failed"] if failed else []), *begun]
        lines.append(f"{arm:{width}}  {', '.join(told)}")
    left = len(sweep.cells) - len(now.done)
    took = [line.outcome.train_s for line in now.done.values()]
    if left and took:
        lines.append(f"{left} cells to go; those that are done trained for {sum(took) / len(took):.0f} s each")
    return "\n".join(lines)
