"""Runs a sweep's cells, each an ordinary run in its own folder, and writes a line of results when each ends.

The state of a sweep is in files: results.jsonl has the finished cells, and cells/ID/cell.json the settings and code of a started
cell. So a killed sweep can continue: finished cells are not run again, and a started cell is resumed like any run. A run that
fails is a result with its fault. A run that is lost (killed, disk full) is no result: the sweep stops, and can be resumed.

Invariants: one sweep works on a folder at a time; all lines of a results file are from the same code, and each cell has the same
settings in all files.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from asyncrl.client import CONTROLLER_END_S, Run
from asyncrl.clock import Clock
from asyncrl.config.load import dump_config
from asyncrl.control.launch.processes import until_gone
from asyncrl.control.lifecycle.state import GOAL_REACHED
from asyncrl.control.tools.choices import examine
from asyncrl.errors import ConfigError, LaunchError, RunError, RunLostError
from asyncrl.folders import write_whole
from asyncrl.observe.steps import JsonLines, read_evals, read_steps
from asyncrl.sweep.grid import SIGNIFICANT, Cell, Sweep
from asyncrl.sweep.results import (
    CellResult,
    Code,
    Outcome,
    code_now,
    machine_now,
    measure_external,
    measure_run,
    read_results,
    value_of,
)

CELL_FILE = "cell.json"


class Begun(msgspec.Struct, frozen=True):
    """A started cell: cell.json in its folder."""

    settings: str
    code: Code
    starts_s: tuple[float, ...] = ()
    """Clock seconds of each start of its run."""
    jobs: int = 1
    """Maximum number of cells that ran at the same time."""


def standing(sweep: Sweep) -> tuple[dict[str, CellResult], dict[str, Begun]]:
    """Return the finished cells, and the started cells that are not finished, by their ids.

    Raises:
        ConfigError: Existing results or cells have other settings, or cannot be read.
    """
    done, begun = dict[str, CellResult](), dict[str, Begun]()
    by_name = {(cell.arm, cell.seed): cell for cell in sweep.cells}
    for line in read_results(sweep.results):
        cell = by_name.get((line.arm, line.seed))
        if cell is None or (line.settings, line.plan.measures) != (cell.settings, sweep.plan.measures):
            other = f"{line.arm} seed {line.seed} with other settings, bar, window or metrics than the sweep's file has now"
            raise ConfigError(f"{sweep.results} has {other}; write to another results file: --results NAME.jsonl")
        done[cell.id] = line
    for cell in sweep.cells:
        path = sweep.cells_folder / cell.id / CELL_FILE
        if cell.id in done or not path.exists():
            continue
        try:
            begun[cell.id] = msgspec.json.decode(path.read_bytes(), type=Begun)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is damaged ({error}); remove its folder to run the cell again") from error
        if begun[cell.id].settings != cell.settings:
            raise ConfigError(f"{path.parent} was begun with other settings than the sweep's file has now; remove that folder")
    return done, begun


async def run_sweep(sweep: Sweep, clock: Clock, say: Callable[[str], None], *, jobs: int = 1, resumed: bool = False) -> None:
    """Run every unfinished cell, and append a line of results when each ends.

    Args:
        sweep: What to run.
        clock: The clock for recorded times.
        say: Called with a line of text for each cell.
        jobs: Number of cells to run at the same time.
        resumed: Whether the sweep may have started before.

    Raises:
        ConfigError: Existing results or cells have other code or settings, another sweep works in this folder, or the runs of an
            arm would fail.
        RunError: A run was lost, or ended before its goal; `asyncrl sweep resume` continues.
    """
    sweep.cells_folder.mkdir(parents=True, exist_ok=True)
    with _locked(sweep.cells_folder) as lock:
        (done, begun), code = standing(sweep), code_now()
        if (done or begun) and not resumed:
            begun_too = f"{len(begun)} more were begun: `asyncrl sweep resume` goes on"
            raise ConfigError(f"{len(done)} of {len(sweep.cells)} cells are in {sweep.results}, {begun_too}")
        for other in [line.code for line in done.values()] + [one.code for one in begun.values()]:
            if other.files != code.files:
                codes = f"{other.version} {other.commit} ({other.files}), this is {code.version} {code.commit} ({code.files})"
                advice = "Results of two codes are not mixed: use that code, or start a new file with --results NAME.jsonl"
                raise ConfigError(f"{sweep.results} or {sweep.cells_folder} has cells of code {codes}. {advice}")
        num_seeds, smallest_p = len(sweep.plan.seeds), sweep.plan.smallest_p
        if len(sweep.plan.arms) > 1 and smallest_p >= SIGNIFICANT:
            say(f"with {num_seeds} seeds nothing can be told apart: the smallest corrected p is {smallest_p:.2f}")
        unfinished = [cell for cell in sweep.cells if cell.id not in done]
        new = {cell.arm: cell for cell in unfinished if not cell.command and cell.id not in begun}
        for cell in new.values():
            if faults := (await asyncio.to_thread(examine, cell.config, devices=False)).faults:
                raise ConfigError("\n".join([f"the runs of {cell.arm} would fail:", *faults]))
        waiting = iter(unfinished)
        num_done, lines = len(done), JsonLines[CellResult](sweep.results)

        async def work() -> None:
            nonlocal num_done
            for cell in waiting:
                line = await _run_cell(cell, sweep, begun.get(cell.id, Begun(cell.settings, code)), clock, jobs, lock)
                lines.write(line)
                num_done, made = num_done + 1, line.outcome
                told = [f"{name} {value:.3f}" for name in sweep.plan.metrics if (value := value_of(made, name)) is not None]
                told += [f"FAILED: {made.fault}"] if made.fault else []
                say(f"{num_done}/{len(sweep.cells)} {cell.id}: {', '.join(told)} ({made.steps} steps in {made.train_s:.0f} s)")

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(jobs):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            lines.close()


async def _run_cell(cell: Cell, sweep: Sweep, begun: Begun, clock: Clock, jobs: int, lock: int) -> CellResult:
    folder = sweep.cells_folder / cell.id
    steps, evals = ([], []) if cell.command else (read_steps(folder), read_evals(folder))
    judged = not cell.config.eval.at_end or (bool(evals) and evals[-1].version >= cell.config.num_steps)
    # A run that is complete, but whose sweep was killed before its line was written, is not started again.
    if steps and steps[-1].version >= cell.config.num_steps and judged:
        outcome = measure_run(folder, cell.config, sweep.plan, begun.starts_s)
    else:
        if not await until_gone(folder, CONTROLLER_END_S):  # the controller of a run whose owner was killed: it ends by itself
            raise LaunchError(f"{folder} is still running; end it with `asyncrl drain {folder}`")
        begun = msgspec.structs.replace(begun, starts_s=(*begun.starts_s, clock.now()), jobs=max(begun.jobs, jobs))
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CELL_FILE, msgspec.json.encode(begun), onto_disk=False)
        if cell.command:
            outcome = await _run_command(cell, folder, sweep, lock)
        else:
            fault = await _run(cell, folder)
            outcome = measure_run(folder, cell.config, sweep.plan, begun.starts_s, fault)
    ended = datetime.fromtimestamp(clock.now(), UTC).isoformat(timespec="seconds")
    return CellResult(
        arm=cell.arm, seed=cell.seed, outcome=outcome, settings=cell.settings, code=begun.code, machine=machine_now(),
        attempts=max(len(begun.starts_s), 1), jobs=begun.jobs, ended=ended, plan=sweep.plan,
    )  # fmt: skip


async def _run(cell: Cell, folder: Path) -> str:
    """Start or resume a run, and wait for its end; return why it failed, or an empty string."""
    run = Run(resume=folder) if (folder / "config.toml").exists() else Run(cell.config)
    try:
        async with run:
            status = await run.wait()
    except RunLostError as error:
        raise RunLostError(f"{error}; `asyncrl sweep resume` goes on with the sweep") from error
    except RunError as error:
        return str(error) or "the run failed"
    if status.version < status.num_steps or status.reason != GOAL_REACHED:
        raise RunError(f"{folder} ended before its goal ({status.reason or 'it was stopped'}); `asyncrl sweep resume` goes on")
    return ""


async def _run_command(cell: Cell, folder: Path, sweep: Sweep, lock: int) -> Outcome:
    """Run an external arm's command in the sweep's folder; an interrupted command starts again.

    The command inherits the lock: if only the sweep is killed, no other sweep can start before the command has ended.
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
            raise LaunchError(f"cannot start `{' '.join(command)}` of {cell.arm}: {error.strerror}") from error
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if code:
        raise RunError(f"the command of {cell.arm} seed {cell.seed} ended with {code}; see {folder / 'command.log'}")
    return measure_external(folder / "result.json", cell.config, sweep.plan)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Lock a folder of cells; the lock of a killed sweep ends with its process."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another sweep works in {folder}; `asyncrl sweep status` shows how far it is") from error
        yield file.fileno()


def status_text(sweep: Sweep) -> str:
    """Return the state of every cell, one line per arm."""
    (done, begun), width = standing(sweep), max(map(len, sweep.plan.arms))
    lines = []
    for arm in sweep.plan.arms:
        cells = [cell for cell in sweep.cells if cell.arm == arm]
        failed = sum(bool(done[cell.id].outcome.fault) for cell in cells if cell.id in done)
        told = [f"{sum(cell.id in done for cell in cells)}/{len(cells)} done", *([f"{failed} failed"] if failed else [])]
        told += [f"seed {cell.seed} at step {len(read_steps(sweep.cells_folder / cell.id))} of {cell.config.num_steps}"
                 for cell in cells if cell.id in begun]  # fmt: skip
        lines.append(f"{arm:{width}}  {', '.join(told)}")
    trained_s = [line.outcome.train_s for line in done.values()]
    if done and len(done) < len(sweep.cells):
        mean_s = sum(trained_s) / len(trained_s)
        lines.append(f"{len(sweep.cells) - len(done)} cells to go; those that are done trained for {mean_s:.0f} s each")
    return "\n".join(lines)
