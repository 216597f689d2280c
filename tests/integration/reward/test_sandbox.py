"""The sandbox against programs that mean harm, and the judging against programs that want to pass without being right."""
# ruff: noqa: E501 - programs are quoted as they are

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from asyncrl.config.reward import CodeExecReward
from asyncrl.reward.sandbox.bubblewrap import ProgramStopped, Sandbox, open_sandbox, probe_sandbox, resident_bytes_of_tree
from asyncrl.reward.sandbox.code_exec import CodeTest, run_tests
from tests.builders import until
from tests.integration.conftest import assert_gone

STATUS = probe_sandbox()
pytestmark = pytest.mark.skipif(not STATUS.works, reason=f"no sandbox on this machine: {STATUS.reason}")
MEMORY_BYTES = 256 << 20


def make_sandbox(**limits) -> Sandbox:
    return open_sandbox(CodeExecReward(**{"cpu_s": 1, "wall_s": 60, "memory_bytes": MEMORY_BYTES, **limits}))


def run_script(code: str, stdin: str = "", **limits) -> dict:
    """Run a program in the sandbox; return its output and status, or what stopped it."""
    confined = make_sandbox(**limits).launch(code)
    try:
        confined.begin()
        confined.send({"op": "run", "stdin": stdin})
        return confined.receive()
    except ProgramStopped as stopped:
        return {"stopped": str(stopped)}
    finally:
        confined.close()


def passed(code: str, *tests: CodeTest, **limits) -> int:
    return run_tests(make_sandbox(**limits), code, list(tests))


def said(code: str) -> str:
    """Return what a program prints that tries something and prints how it went."""
    indented = "\n".join(f"    {line}" for line in code.splitlines())
    reply = run_script(
        f"import os\ntry:\n{indented}\n    print('did it')\nexcept BaseException as error:\n    print(type(error).__name__, error)"
    )
    assert "output" in reply, reply
    return reply["output"]


@pytest.mark.parametrize("kind", ["none", "bubblewrap"])
def test_a_launch_that_runs_out_of_descriptors_at_any_point_leaves_none(kind):
    """In a process of its own: ZeroMQ's threads, which other tests started in this one, abort where there are none left."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_DESCRIPTORS, kind], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


OUT_OF_DESCRIPTORS = """
import sys
from asyncrl.errors import RewardError
from asyncrl.config.reward import CodeExecReward
from asyncrl.reward.sandbox.bubblewrap import open_sandbox
from tests.descriptors import descriptors_left, open_descriptors

sandbox = open_sandbox(CodeExecReward(sandbox=sys.argv[1]))
sandbox.launch("").close()
descriptors, outcomes = open_descriptors(), []
for free in range(16):
    with descriptors_left(free):
        try:
            sandbox.launch("").close()
        except RewardError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("")
    assert open_descriptors() <= descriptors
assert "Too many open files" in outcomes[0]
assert not outcomes[-1]
"""


# -- what a program may not do -------------------------------------------------------------------------------------------


def test_no_network_not_even_to_this_machine_nor_an_abstract_unix_socket_of_it():
    name = f"\0asyncrl-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        assert "did it" not in said(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)")
        with pytest.raises(TimeoutError):
            listener.accept()
        abstract.bind(name)
        abstract.listen()
        assert "did it" not in said(f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})")


def test_no_file_and_no_environment_of_this_machine_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    assert "SECRET_TOKEN" not in said("print(dict(os.environ))")
    secret = tmp_path / "ledger.sqlite"
    secret.write_text("secret")
    secret.chmod(0o666)
    folders = ("/root", "/home", "/var", "/sys", "/run")
    for path in ("/etc/shadow", "/etc/passwd", str(secret), __file__, "/proc/1/environ", *folders):
        assert "Error" in said(f"print(os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read())"), path


def test_writes_only_to_scratch_space_that_is_gone_afterwards():
    for path in ("/usr/evil", "/evil", "/bin/evil", "/dev/evil", "/lib/evil", "/usr/bin/python3"):
        assert "Error" in said(f"open({path!r}, 'w')"), path
    name = f"/tmp/asyncrl-test-{os.getpid()}"
    assert "did it" in said(f"open({name!r}, 'w').write('x')")
    assert not Path(name).exists()
    assert "FileNotFoundError" in said(f"open({name!r})")


def test_scratch_space_is_bounded():
    fill = """
total = 0
try:
    while total < 80:
        open(f'/dev/shm/{total}', 'wb').write(bytes(1 << 20))
        total += 1
except OSError as error:
    print(error)
os.system('rm /dev/shm/*')
"""
    assert "No space left" in said(fill)
    assert "No space left" in said(fill.replace("/dev/shm", "/tmp").replace("print(error)", "os.remove('/tmp/0'); print(error)"))


def test_is_nobody_without_capabilities_or_namespaces_of_its_own():
    if os.geteuid() == 0:
        assert said("print(os.getuid(), os.geteuid(), os.getgroups())").startswith("65534 65534")
    assert "Error" in said("os.setuid(0)" if os.geteuid() else "os.setuid(1)")
    for call in ("unshare(0x10000000)", "mount(b'none', b'/tmp', b'tmpfs', 0, None)"):
        assert "AssertionError" in said(f"import ctypes\nassert ctypes.CDLL(None).{call} == 0"), call


def test_sees_and_signals_no_process_of_this_machine():
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert "ProcessLookupError" in said(f"os.kill({bystander.pid + (1 << 21)}, 9)")
        said(f"os.kill({bystander.pid}, 9)")
        run_script("import os\nos.kill(-1, 9)")
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"\n")


# -- limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.timed
def test_an_infinite_loop_ends_at_the_cpu_limit_and_sleep_at_the_wall_limit():
    assert run_script("while True: pass", wall_s=120)["status"] < 0
    assert run_script("import time\ntime.sleep(1000)", wall_s=1.0) == {"stopped": "ran past 1 s"}


@pytest.mark.timed
def test_fork_bomb_is_stopped_and_leaves_nothing():
    confined = make_sandbox(wall_s=2.0).launch("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass")
    confined.begin()
    confined.send({"op": "run", "stdin": ""})
    try:
        with pytest.raises(ProgramStopped):
            confined.receive()
        bomb = inside(confined.pid)
    finally:
        confined.close()
    assert 2 < len(bomb) < 60
    assert_gone(bomb)


@pytest.mark.timed
def test_memory_of_a_process_and_of_all_together_is_limited():
    reply = run_script(f"print(len(bytearray({MEMORY_BYTES})))")
    assert (reply["status"], reply["output"]) == (1, "")
    code = "import os, time\nfor _ in range(8):\n    if os.fork() == 0: break\nheld = bytearray(os.urandom(1)) * (100 << 20)\ntime.sleep(60)"
    assert "bytes are allowed" not in run_script("print('small')").get("stopped", "")
    assert "are allowed" in run_script(code)["stopped"]


def test_output_flood_is_cut_and_costs_no_memory_here():
    before_bytes = resident_bytes_of_tree(os.getpid())
    reply = run_script("while True: print('x' * 10000)", output_bytes=1 << 16)
    assert reply["status"] != 0
    assert len(reply["output"]) <= 1 << 16
    assert resident_bytes_of_tree(os.getpid()) - before_bytes < 50 << 20


def test_a_huge_return_value_or_an_endless_loop_fails_the_one_test_only():
    tests = [CodeTest(function="f", args=[10**8], expected="x"), CodeTest(function="f", args=[1], expected="x")]
    assert passed("def f(n): return 'x' * n", *tests, output_bytes=1 << 16) == 1
    assert passed("def f(n): return 'x' * n", *reversed(tests), output_bytes=1 << 16) == 1
    code = "def f(n):\n    while n == 0: pass\n    return n"
    assert passed(code, *(CodeTest(function="f", args=[n], expected=n) for n in (1, 0, 2))) == 2
    assert passed(code, *(CodeTest(code=f"assert f({n}) == {n}") for n in (1, 0, 2))) == 2


def test_sandbox_dies_with_the_process_that_started_it(tmp_path):
    code = """
import sys
from asyncrl.config.reward import CodeExecReward
from asyncrl.reward.sandbox.bubblewrap import open_sandbox
confined = open_sandbox(CodeExecReward()).launch("import time; time.sleep(100)")
confined.begin()
confined.send({"op": "run", "stdin": ""})
print(confined.pid, flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    asyncio.run(until(lambda: len(inside(pid)) >= 3))
    those = inside(pid)
    owner.kill()
    owner.communicate()
    assert_gone(those)


# -- the judge ---------------------------------------------------------------------------------------------------------


def test_one_judge_serves_all_programs_and_is_replaced_where_it_hangs_or_dies():
    sandbox, asked = make_sandbox(wall_s=10.0), [CodeTest(code="assert f(2) == 4"), CodeTest(code="assert f(3) == 6")]
    double = "def f(x): return 2 * x"
    assert run_tests(sandbox, double, asked) == 2
    first = sandbox.judge().pid
    for wrong in ("import os\nos.kill(os.getppid(), 9)", "def f(x): return 5", "import time\ndef f(x): time.sleep(60)"):
        assert run_tests(sandbox, wrong, asked) == 0
    second = sandbox.judge().pid
    assert run_tests(sandbox, double, asked) == 2
    assert sandbox.judge().pid == second != first
    os.kill(second, signal.SIGKILL)
    asyncio.run(until(lambda: sandbox.judge().pid != second))
    assert run_tests(sandbox, double, asked) == 2
    third = sandbox.judge().pid
    sandbox = None
    assert not Path(f"/proc/{third}").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can show that others can use it too")
def test_works_for_an_ordinary_user():
    code = "from asyncrl.reward.sandbox.bubblewrap import probe_sandbox; print(probe_sandbox().works)"
    root, site_packages = Path(__file__).parents[3], Path(msgspec.__file__).parents[1]
    done = subprocess.run(
        ["/usr/bin/python3", "-c", code], env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{root}:{site_packages}"},
        user=12345, group=12345, extra_groups=[], cwd="/", capture_output=True, text=True,
    )  # fmt: skip
    if "ModuleNotFoundError" in done.stderr or "PermissionError" in done.stderr:
        pytest.skip("an ordinary user cannot read this checkout")
    assert done.stdout == "True\n", done.stderr


def inside(pid: int) -> set[psutil.Process]:
    """Return a process and all below it; none where it is gone."""
    try:
        top = psutil.Process(pid)
        return {top, *top.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()
