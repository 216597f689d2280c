"""The daemon whole, in this process: TLS and its names, when it is ready, and which GPUs the controllers of its runs see."""

import asyncio
import contextlib
import resource
import socket
import ssl
import subprocess
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest
from aiohttp.test_utils import TestClient, TestServer

from asyncrl.clock import SystemClock
from asyncrl.config.load import dump_config, resolve_config
from asyncrl.control.launch.processes import find_controllers, kill_controllers
from asyncrl.errors import ConfigError, LaunchError
from asyncrl.observe.steps import EVENTS_FILE, STEPS_FILE, RunEvent, StepReport
from asyncrl.serve.client import Server
from asyncrl.serve.daemon import URL_FILE, ServeOptions, Viewed, own_records, serve, view_runs
from asyncrl.serve.keeper import Keeper
from asyncrl.serve.machine import Machine
from asyncrl.serve.records import RUNS, SUBMITTED_FILE, TOKEN_FILE, Guard, Records, RunRecord, new_token
from asyncrl.serve.routes import Service
from tests.builders import until, write_rows

PHASES = ("starting", "running", "failed")


@pytest.fixture
def certificate(tmp_path):
    """Of its own, for 127.0.0.1: the files of the certificate and the key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    named = ("-subj", "/CN=asyncrl", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run(["openssl", "req", "-x509", *curve, *named, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def write_steps(folder, version):
    """Write a file of steps, of which the newest alone can be read."""
    newest = msgspec.json.encode(StepReport(step=version - 1, version=version, time_s=2.0, reward_mean=0.5))
    (folder / STEPS_FILE).write_bytes(b'{"of": "another version"}\n' + newest + b"\n")


@pytest.fixture
def earlier_run(tmp_path):
    """A run of an earlier daemon, which has ended; yields what holds a process that looks like another controller of it."""
    folder = tmp_path / "served" / RUNS / "before"
    with contextlib.closing(Records(tmp_path / "served")) as records:
        records.put_run(RunRecord(id="before", number=1, state="live", num_steps=5))
    ended = RunEvent(seq=1, time_s=1.0, kind="phase", subject="stopped", text="as it was told")
    write_rows(folder / EVENTS_FILE, ended)
    write_steps(folder, 3)
    words = ("sh", "-c", "read line", "asyncrl.pipeline", "controller", "controller", str(folder.resolve()))
    with subprocess.Popen(words, stdin=subprocess.PIPE) as controller:
        assert find_controllers(folder) == [controller.pid]
        yield controller.stdin


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    """The socket at which systemd is told."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.delenv("WATCHDOG_USEC", raising=False)
        yield listening
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_over_tls_by_its_names_alone_and_ready_once_a_run_of_before_has_its_verdict(
    tmp_path, certificate, earlier_run, systemd
):
    folder, (cert, key) = tmp_path / "served", certificate
    with own_records(folder) as records:
        new_token(records, "ann", "submitter", SystemClock())  # a daemon without an admin makes one, whoever is known
    options = ServeOptions(folder, port=0, tls_cert=cert, tls_key=key, allow_hosts=("runs.example",))
    trusted = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=cert))
    async with asyncio.TaskGroup() as group, aiohttp.ClientSession(connector=trusted) as http:
        serving = group.create_task(serve(options))
        await until((folder / URL_FILE).exists)
        url = (folder / URL_FILE).read_text()
        token = (folder / TOKEN_FILE).read_text().strip()
        port = url.removeprefix("https://127.0.0.1:")
        for host, status in (
            (f"127.0.0.1:{port}", 200), ("runs.example", 200), (f"Runs.Example:{port}", 200), ("runs.example.org", 403),
            ("evil.example", 403), ("evil.runs.example", 403),
        ):  # fmt: skip
            async with http.get(f"{url}/healthz", headers={"Host": host}) as answer:
                assert answer.status == status, host
        async with http.post(f"{url}/v1/login", json={"token": token}) as answer:
            assert [cookie["secure"] for cookie in answer.cookies.values()] == [True]
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"http://127.0.0.1:{port}/healthz")

        async def asked(path):
            async with http.get(url + path, headers={"Authorization": f"Bearer {token}"}) as answer:
                return answer.status, await answer.json()

        for _ in range(5):
            assert await asked("/readyz") == (503, {"ready": False, "reason": "runs of before are being looked at"})
        with pytest.raises(BlockingIOError):
            systemd.recv(100)
        assert (await asked("/v1/runs/before"))[1]["state"] == "live"
        earlier_run.close()
        async with asyncio.timeout(100):
            assert await asyncio.get_running_loop().sock_recv(systemd, 100) == b"READY=1"
        assert await asked("/readyz") == (200, {"ready": True, "reason": ""})
        run = (await asked("/v1/runs/before"))[1]
        told = [run[name] for name in ("state", "outcome", "reason", "attempts", "version")]
        assert told == ["ended", "stopped", "as it was told", 0, 3]
        serving.cancel()
    assert not (folder / URL_FILE).exists()


@pytest.mark.parametrize(("options", "error", "said"), [
    ({"host": "0.0.0.0"}, ConfigError, "is open to others"), ({"tls_key": Path("key")}, ConfigError, "go together"),
    ({"host": "runs.example"}, ConfigError, "takes an IP address"),
    ({"code_roots": (Path("/nowhere"),)}, ConfigError, "no folder"),
    ({"tls_cert": Path("/nowhere"), "tls_key": Path("/nowhere")}, ConfigError, "cannot be used"),
    ({}, LaunchError, r"another daemon serves .*/served at http://127\.0\.0\.1:7717; its tokens"),
    ({"folder": "other"}, LaunchError, "cannot listen"),
])  # fmt: skip
async def test_a_daemon_that_would_be_open_or_in_the_way_is_refused(tmp_path, systemd, options, error, said):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / URL_FILE).write_text("http://127.0.0.1:7717")
    with own_records(tmp_path / "served"), socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"port": taken.getsockname()[1], **options, "folder": tmp_path / options.get("folder", "served")}
        with pytest.raises(error, match=said):
            await serve(ServeOptions(**given))


async def test_a_daemon_that_is_not_there_is_said():
    with pytest.raises(LaunchError, match="no daemon answers"):
        async with Server("http://127.0.0.1:9", "x"):
            pass


async def test_viewed_folders_of_the_same_name_cannot_be_told_apart(tmp_path):
    with pytest.raises(ConfigError, match="these are given twice: same"):
        await view_runs([tmp_path / "a" / "same", tmp_path / "b" / "same"], 0, print)


def test_of_a_run_that_is_viewed_the_newest_step_is_read_and_each_event_once(tmp_path):
    folder = tmp_path / "before"
    folder.mkdir()
    (folder / "config.toml").write_text("num_steps = 5")
    write_steps(folder, 3)
    phases = [
        RunEvent(seq=seq, time_s=float(seq), kind="phase", subject=phase, text=phase) for seq, phase in enumerate(PHASES, 1)
    ]
    write_rows(folder / EVENTS_FILE, *phases[:2])
    with contextlib.closing(Records(tmp_path / "aside")) as records:
        records.elsewhere = {"before": folder}
        viewed = Viewed(Keeper(records, Machine(), SystemClock()), "before", 0)
        viewed.look()
        seen = records.runs["before"]
        assert (seen.version, seen.reason, seen.started_s, seen.ended_s) == (3, "running", 1.0, 2.0)
        with (folder / EVENTS_FILE).open("r+b") as file:
            file.write(b"?")  # what was read is read no more
        with (folder / EVENTS_FILE).open("ab") as file:
            file.write(b"torn\n" + msgspec.json.encode(phases[2]) + b"\n")
        write_steps(folder, 4)
        viewed.look()
        seen = records.runs["before"]
        assert (seen.version, seen.outcome, seen.started_s, seen.ended_s) == (4, "failed", 1.0, 3.0)


@pytest.fixture
async def two_gpus(tmp_path):
    """A daemon's interface with a machine of two GPUs, whose keeper starts runs; they are killed in the end."""
    clock, records = SystemClock(), Records(tmp_path)
    keeper = Keeper(records, Machine(("GPU-a", "GPU-b"), cores=8, memory_bytes=1 << 40), clock)
    service = Service(records, keeper, Guard(records, {"127.0.0.1"}), clock)
    headers = {"Authorization": f"Bearer {new_token(records, 'me', 'admin', clock)}"}
    async with asyncio.TaskGroup() as group, TestClient(TestServer(service.app()), headers=headers) as client:
        keeping = group.create_task(keeper.run())
        yield client
        keeping.cancel()
    for folder in (tmp_path / RUNS).iterdir():
        while find_controllers(folder):
            kill_controllers(folder)
    records.close()


def seen_by_controllers(folder):
    with contextlib.suppress(psutil.Error):
        return {psutil.Process(pid).environ().get("CUDA_VISIBLE_DEVICES") for pid in find_controllers(folder)}


async def test_a_run_that_is_resumed_keeps_its_gpus_where_nvidia_smi_gives_no_answer(tmp_path):
    no_model = {"learner.fake_step_s": 0.0, "learner.device": "cuda", "generate.engine": {"kind": "fake"}}
    with contextlib.closing(Records(tmp_path)) as records:
        records.put_run(RunRecord(id="r", number=1, state="live", num_steps=9, gpus=("GPU-a",)))
        folder = records.run_folder("r")
        (folder / SUBMITTED_FILE).write_text(dump_config(resolve_config("quickstart", no_model)))
        keeper = Keeper(records, Machine(cores=8, memory_bytes=1 << 40), SystemClock())
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(keeper.run())
            await until(lambda: seen_by_controllers(folder) == {"GPU-a"})
            keeping.cancel()
        while find_controllers(folder):
            kill_controllers(folder)


async def test_each_run_sees_a_gpu_of_its_own_and_the_next_waits_until_one_is_free(two_gpus, tmp_path):
    no_model = {"learner.fake_step_s": 0.0, "learner.device": "cuda", "generate.engine": {"kind": "fake"}}
    for name in ("one", "two", "three"):
        assert (await two_gpus.post("/v1/runs", json={"name": name, "set": no_model})).status == 201
    queue = await (await two_gpus.get("/v1/queue")).json()
    assert ([run["id"] for run in queue["runs"]], queue["waits"]) == (["three"], ["1 GPUs (0 free)"])
    there = await (await two_gpus.get("/v1/machine")).json()
    demand = queue["runs"][0]["demand"]
    assert demand["gpus"] == 1
    assert there == {
        "has": {"gpus": ["GPU-a", "GPU-b"], "cores": 8, "memory_bytes": 1 << 40, "is_asked_again": False},
        "in_use": [
            {"run": "one", "gpus": ["GPU-a"], "demand": demand}, {"run": "two", "gpus": ["GPU-b"], "demand": demand},
        ],
    }  # fmt: skip
    for name, gpu in (("one", "GPU-a"), ("two", "GPU-b")):
        await until(lambda folder=tmp_path / RUNS / name, gpu=gpu: seen_by_controllers(folder) == {gpu})
    assert not find_controllers(tmp_path / RUNS / "three")
