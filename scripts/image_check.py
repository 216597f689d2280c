"""Run the Dockerfile's steps in a bare Debian root, down to its entry point and health check, where there is no Docker.

    python scripts/image_check.py /tmp/image [--bind DIR ...] [--keep] [--results deploy/RESULTS.md]

Needs root, `debootstrap`, and port 7717. The root gets Debian's own Python in place of the base image's. Every ARG, ENV, WORKDIR,
COPY, RUN and USER of the Dockerfile is carried out in it, in a mount and pid namespace of its own; VOLUME is a folder of its own
beside it. Then, as the image's user, who must not be root: where asyncrl is imported from, whether torch is a build for CPUs,
whether there is a C compiler, the entry point with `--version`, `doctor`, the daemon with the image's CMD, the image's health
check, the page, a run, its controller killed, after which no zombie may stay, SIGTERM, which must drain, and `asyncrl view` of
the run. `--bind` makes folders of this machine visible there (a package index on the disk, say). `--results` writes what was
found to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
TRAINS = """
import asyncio, asyncrl, sys

async def main(token, attempt):
    async with asyncrl.Server("http://127.0.0.1:7717", token) as server:
        small = {"num_steps": 2000, "model.warm_start.steps": 2, "eval.num_prompts": 8, "algorithm.groups_per_step": 4}
        if not await server.runs():
            await server.submit("quickstart", set=small)
        run = await server.show("quickstart")
        while run.attempts < int(attempt) or run.state != "live":
            await asyncio.sleep(0.5)
            run = await server.show("quickstart")
        async with server.connect("quickstart") as live:
            while (status := await live.status()).phase != "running" or status.version < 2:
                await asyncio.sleep(0.5)

asyncio.run(main(*sys.argv[1:]))
"""
"""Submits the run where there is none, and waits until that attempt of it trains."""


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0].upper(), line.split(maxsplit=1)[1].strip()) for line in text.splitlines() if line.strip()]


class Root:
    """A folder that is somebody's `/`."""

    def __init__(self, path: Path, binds: list[str]) -> None:
        self.path, self.binds = path, binds
        self.env = {"PATH": "/usr/local/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
        self.env |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.user, self.workdir, self.volumes = "root", "/", dict[str, Path]()

    def command(self, words: list[str]) -> list[str]:
        """Return what runs `words` there, as its user, process 1 of a pid namespace."""
        mounts = [f"mount --bind {bind} {self.path}{bind}" for bind in self.binds]
        mounts += [f"mount --bind {kept} {self.path}{where}" for where, kept in self.volumes.items()]
        mounts += [
            f"mount -t proc proc {self.path}/proc",
            f"mount -t tmpfs tmpfs {self.path}/dev/shm",
            f"mount --bind /dev/null {self.path}/dev/null",
        ]
        inside = f"cd {self.workdir} && exec {shlex.join(words)}"
        enter = f"exec chroot --userspec={self.user} {self.path} /bin/sh -c {shlex.quote(inside)}"
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", " && ".join([*mounts, enter])]

    def run(self, words: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        """Run something there."""
        return subprocess.run(self.command(words), env=self.env, text=True, check=True, **more)  # type: ignore[call-overload, no-any-return]


def bootstrap(root: Root) -> None:
    """Make the bare root, with a Python that `pip` installs into."""
    subprocess.run(
        [
            "debootstrap",
            "--variant=minbase",
            "--include=python3,python3-dev,python3-venv,ca-certificates",
            "bookworm",
            str(root.path),
        ],
        check=True,
    )
    for bind in root.binds:
        Path(f"{root.path}{bind}").mkdir(parents=True, exist_ok=True)
    for name in ("/etc/resolv.conf", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt", "/etc/hosts"):
        if Path(name).exists():
            shutil.copyfile(name, f"{root.path}{name}")
    for name in ("/etc/apt/apt.conf.d", "/etc/apt/sources.list.d"):
        if name.endswith("conf.d"):
            shutil.copytree(name, f"{root.path}{name}", dirs_exist_ok=True)
    (root.path / "dev" / "shm").mkdir(exist_ok=True)
    root.run(["python3", "-m", "venv", "/usr/local/venv"])


def build(root: Root, steps: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Carry the instructions out; return what starts the image, and its health check."""
    args: dict[str, str] = {}
    said: dict[str, list[str]] = {}
    for name, rest in steps:
        print(f"-- {name} {rest[:100]}", flush=True)
        if name == "ARG":
            key, _, value = rest.partition("=")
            args[key] = value.strip('"')
        elif name == "ENV":
            root.env |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif name == "WORKDIR":
            root.workdir = rest
            (root.path / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "VOLUME":  # a new one belongs to who owns the folder in the image
            root.volumes[rest] = Path(f"{root.path}-volume")
            root.volumes[rest].mkdir(exist_ok=True)
            owner = (root.path / rest.lstrip("/")).stat()
            os.chown(root.volumes[rest], owner.st_uid, owner.st_gid)
        elif name == "USER":
            root.user = rest
        elif name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                to = root.path / root.workdir.lstrip("/") / (target if target != "./" else source)
                copy = shutil.copytree if (SOURCE / source).is_dir() else shutil.copyfile
                copy(SOURCE / source, to)
        elif name == "RUN":
            given = " ".join(f"{key}={shlex.quote(value)}" for key, value in args.items() if key != "BASE")
            root.run(["sh", "-ec", f"{given}; {rest}"])
        elif name in {"ENTRYPOINT", "CMD"}:
            said[name] = json.loads(rest)
        elif name == "HEALTHCHECK":
            said[name] = json.loads(rest[rest.index("[") :])
    return said


def said_by(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def children(pid: int, what: str) -> list[tuple[str, str]]:
    """Return a process's children, and what `ps` calls `what` of each."""
    return [
        (one.split()[0], one.split(maxsplit=1)[1])
        for one in said_by("ps", "-o", f"pid=,{what}=", "--ppid", str(pid)).splitlines()
    ]


class Found(dict[str, str]):
    """What was looked at, and what was found; each is printed at once."""

    def __setitem__(self, what: str, found: str) -> None:
        super().__setitem__(what, found)
        print(f"{what}: {found}", flush=True)


def check(condition: object, otherwise: str) -> None:
    """End where something is not as it must be."""
    if not condition:
        sys.exit(otherwise)


def page_answers(url: str) -> str:
    """Return what was served of the page, which must be the source's files."""
    page = SOURCE / "asyncrl" / "serve" / "page"
    for where, name in (("/", "index.html"), ("/page/page.js", "page.js")):
        with urllib.request.urlopen(url + where, timeout=60) as answer:
            check(answer.read() == (page / name).read_bytes(), f"{url}{where} is not {name}")
    return "`/` and `/page/page.js` answer 200, with the source's bytes"


def judge_doctor(said: str) -> str:
    """Return what the doctor misses. In a chroot nobody may make a user namespace, and it must say so in one line and go on."""
    findings = [line for line in said.splitlines() if not line.startswith(" ")]
    check(all(line.startswith(("ok  ", "MISS")) for line in findings), f"doctor printed something else: {said}")
    names = [line.split()[1] for line in findings]
    (sandbox,) = [line for line in findings if line.split()[1] == "sandbox"]
    check(sandbox.startswith("MISS"), f"the sandbox works in a chroot: {sandbox}")
    check({"mps", "torch", "msgspec"} <= set(names[names.index("sandbox") :]), f"doctor did not go on after the sandbox: {said}")
    missing = [line.removeprefix("MISS").strip() for line in findings if line.startswith("MISS")]
    return f"{len(findings)} findings, missing: " + "; ".join(textwrap.shorten(line, 150) for line in missing)


def look(root: Root, said: dict[str, list[str]], found: Found) -> None:
    """Start what was built, as its user."""
    entry = said["ENTRYPOINT"]
    root.env["HOME"] = "/home/asyncrl"
    where = "import os, shutil, sys, asyncrl, torch; "
    where += "print(os.getuid(), asyncrl.__file__, torch.__version__, sys.version.split()[0], shutil.which('gcc'))"
    uid, installed, torch, python, compiler = root.run(["python", "-c", where], capture_output=True).stdout.split()
    check(uid != "0" and "site-packages" in installed, f"the image runs as user {uid}, with asyncrl of {installed}")
    check(torch.endswith("+cpu"), f"torch {torch} is not a build for CPUs")
    check(compiler != "None", "the image has no gcc, which Triton needs on GPUs")
    found["user"], found["asyncrl"], found["Python"], found["torch"] = uid, f"`{installed}`", python, torch
    version = root.run([*entry, "--version"], capture_output=True).stdout.strip()
    check(f'"{version}"' in (SOURCE / "asyncrl" / "__init__.py").read_text(), f"`asyncrl --version` says {version!r}")
    found["`asyncrl --version`"] = version
    found["`asyncrl doctor`"] = judge_doctor(root.run([*entry, "doctor"], capture_output=True).stdout)
    look_at_daemon(root, [*entry, *said["CMD"]], said["HEALTHCHECK"], found)
    view = subprocess.Popen(
        root.command([*entry, "view", "/work/served/runs/quickstart"]), env=root.env, stdout=subprocess.PIPE, text=True
    )
    try:
        url = (view.stdout.readline() if view.stdout else "").partition("/#")[0]
        found["`asyncrl view` of the run"] = page_answers(url)
    finally:
        view.kill()


def look_at_daemon(root: Root, daemon_command: list[str], health_check: list[str], found: Found) -> None:
    """Start the daemon, have it run something, kill a controller, and end the daemon."""
    (volume,) = root.volumes.values()
    daemon = subprocess.Popen(root.command(daemon_command), env=root.env)
    try:
        for _ in range(120):
            if (volume / "served" / "server.url").exists():
                break
            time.sleep(0.5)
        root.run(health_check)
        found["the image's health check"] = "passes"
        found["the daemon's page"] = page_answers("http://127.0.0.1:7717")
        token = (volume / "served" / "admin.token").read_text().strip()
        root.run(["python", "-c", TRAINS, token, "1"])
        found["a run of the daemon"] = "trains"
        child = int(said_by("pgrep", "-n", "-x", "tini"))
        (controller,) = [int(pid) for pid, command in children(child, "args") if "serve" not in command.split()]
        os.kill(controller, 9)  # its processes are process 1's children then, and end
        root.run(["python", "-c", TRAINS, token, "2"])
        states = [state for _, state in children(child, "stat")]
        check(not any(state.startswith("Z") for state in states), "children of a killed controller stay as zombies")
        found["its controller killed (SIGKILL)"] = f"the daemon resumes it; process 1 has {len(states)} children, no zombie"
        began = time.monotonic()
        os.kill(child, 15)
        status, seconds = daemon.wait(timeout=300), time.monotonic() - began
    finally:
        daemon.kill()
    checkpoints = sorted((volume / "served/runs/quickstart/checkpoints").glob("step-*"))
    check(status == 0 and checkpoints, f"the daemon ended with {status}; checkpoints: {checkpoints}")
    drained = f"the run is drained to {checkpoints[-1].name} and the daemon ends with 0"
    found["SIGTERM to process 1"] = f"{drained}, {seconds:.1f} s after"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("--keep", action="store_true", help="Leave the root there.")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    root, found, began = Root(options.root, options.bind), Found(), time.monotonic()
    bootstrap(root)
    try:
        said = build(root, instructions((SOURCE / "Dockerfile").read_text()))
        used = said_by("du", "-sxm", str(options.root)).split()[0]
        found["debootstrap and the Dockerfile's steps"] = f"{time.monotonic() - began:.0f} s; the root has {used} MB"
        look(root, said, found)
    finally:
        if not options.keep:
            for path in (options.root, *root.volumes.values()):
                shutil.rmtree(path, ignore_errors=True)
    if options.results:
        rows = "\n".join(f"| {what} | {text} |" for what, text in found.items())
        head = "# What the image does\n\nMade by `scripts/image_check.py`, whose docstring says how, without Docker"
        options.results.write_text(f"{head}, on {datetime.now(UTC):%Y-%m-%d}.\n\n| | found |\n|---|---|\n{rows}\n")


if __name__ == "__main__":
    main()
