"""Run the Dockerfile's steps in a bare Debian root, down to its entry point and health check, where there is no Docker.

    python scripts/image_check.py /tmp/image [--bind DIR ...] [--keep]

Needs root and `debootstrap`. The root gets Debian's own Python in place of the base image's. Every ARG, ENV, WORKDIR, COPY, RUN and USER
of the Dockerfile is carried out in it, in a mount and pid namespace of its own; VOLUME is a folder of its own beside it. Then, as the
image's user, who must not be root: where asyncrl is imported from, the entry point with `--version`, `doctor`, the daemon with the
image's CMD, the image's health check, a run of two steps, its controller killed, after which no zombie may stay, and SIGTERM, which
must drain.
`--bind` makes folders of this machine visible there (a package index on the disk, say).
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
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]


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


def look(root: Root, said: dict[str, list[str]]) -> None:
    """Start what was built, as its user."""
    entry = said["ENTRYPOINT"]
    root.env["HOME"] = "/home/asyncrl"
    (volume,) = root.volumes.values()
    where = "import os, asyncrl; print(os.getuid(), asyncrl.__file__)"
    uid, installed = root.run(["python", "-c", where], capture_output=True).stdout.split()
    if uid == "0" or "site-packages" not in installed:
        sys.exit(f"the image runs as user {uid}, with asyncrl of {installed}")
    print(root.run([*entry, "--version"], capture_output=True).stdout)
    doctor = root.run([*entry, "doctor"], capture_output=True).stdout
    if "sandbox" not in doctor:
        sys.exit(f"doctor did not come to the sandbox: {doctor}")
    print(doctor)
    daemon = subprocess.Popen(root.command([*entry, *said["CMD"]]), env=root.env)
    try:
        for _ in range(120):
            if (volume / "served" / "server.url").exists():
                break
            time.sleep(0.5)
        root.run(said["HEALTHCHECK"])
        print("health check: ok", flush=True)
        token = (volume / "served" / "admin.token").read_text().strip()
        submit = (
            "import asyncio, asyncrl\n"
            "async def main():\n"
            f"    async with asyncrl.Server('http://127.0.0.1:7717', {token!r}) as server:\n"
            "        small = {'num_steps': 2000, 'model.warm_start.steps': 2, 'eval.num_prompts': 8, 'algorithm.groups_per_step': 4}\n"
            "        if not await server.runs(): await server.submit('quickstart', set=small)\n"
            "        run = await server.show('quickstart')\n"
            "        while run.attempts < ATTEMPT or run.state != 'live':\n"
            "            await asyncio.sleep(0.5)\n"
            "            run = await server.show('quickstart')\n"
            "        async with server.connect('quickstart') as live:\n"
            "            while (status := await live.status()).phase != 'running' or status.version < 2: await asyncio.sleep(0.5)\n"
            "asyncio.run(main())\n"
        )
        root.run(["python", "-c", submit.replace("ATTEMPT", "1")])
        print("a run of the daemon trains", flush=True)
        child = int(said_by("pgrep", "-n", "-x", "tini"))
        (controller,) = [int(pid) for pid, command in children(child, "args") if "serve" not in command.split()]
        os.kill(controller, 9)  # its processes are process 1's children then, and end
        root.run(["python", "-c", submit.replace("ATTEMPT", "2")])
        print(f"resumed after SIGKILL; children of process 1: {[state for _, state in children(child, 'stat')]}", flush=True)
        if any(state.startswith("Z") for _, state in children(child, "stat")):
            sys.exit("children of a killed controller stay as zombies")
        os.kill(child, 15)
        print(f"SIGTERM: the daemon ended with {daemon.wait(timeout=300)}")
    finally:
        daemon.kill()
    checkpoints = list((volume / "served/runs/quickstart/checkpoints").glob("step-*"))
    if not checkpoints:
        sys.exit("the run was not drained: it has no checkpoint")
    print(f"drained: {checkpoints[-1].name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("--keep", action="store_true", help="Leave the root there.")
    options = parser.parse_args()
    root = Root(options.root, options.bind)
    bootstrap(root)
    try:
        look(root, build(root, instructions((SOURCE / "Dockerfile").read_text())))
    finally:
        if not options.keep:
            for path in (options.root, *root.volumes.values()):
                shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
