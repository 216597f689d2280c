import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_sockets import VARIABLE, socket_folder

OWNER = """
import os, sys, time
from asyncrl.generate.vllm_sockets import socket_folder
folder = socket_folder(os.environ)
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder of a name short enough for sockets, which pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as folder:
        yield Path(folder)


def test_a_closed_folder_is_gone_with_what_was_in_it(short: Path) -> None:
    folder = socket_folder({VARIABLE: str(short)})
    (folder.path / "socket").touch()
    assert folder.path.parent == short
    folder.close()
    folder.close()
    assert os.listdir(short) == []


def test_what_a_killed_owner_left_is_removed_by_the_next_one_and_not_before_it_is_dead(short: Path) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, VARIABLE: str(short)}) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().decode().strip())
        (left / "socket").touch()
        other = socket_folder({VARIABLE: str(short)})
        assert (left / "socket").exists(), "its owner lives"
        owner.kill()
        owner.wait()
        mine = socket_folder({VARIABLE: str(short)})
        assert not left.exists()
        assert sorted(short.iterdir()) == sorted([other.path, mine.path])
    other.close()
    mine.close()


def test_a_process_that_a_killed_owner_left_is_ended_by_the_next_one_and_no_other_is(short: Path) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, VARIABLE: str(short)}) as owner:
        assert owner.stdout is not None
        left = owner.stdout.readline().decode().strip()
        theirs, stranger = (subprocess.Popen(["sleep", "60"], env={**os.environ, VARIABLE: path}) for path in (left, str(short)))
        try:
            socket_folder({VARIABLE: str(short)}).close()
            assert theirs.poll() is None, "its owner lives"
            owner.kill()
            owner.wait()
            socket_folder({VARIABLE: str(short)}).close()
            assert theirs.wait(30) == -signal.SIGKILL
            assert stranger.poll() is None
        finally:
            for process in (theirs, stranger):
                process.kill()
                process.wait()


def test_sockets_stay_within_the_kernels_107_bytes_however_long_the_folder_for_temporary_files_is(short: Path) -> None:
    longest = short / ("x" * (48 - len(str(short)) - 1))
    for wanted in (longest, short / ("x" * 60)):
        wanted.mkdir()
        folder = socket_folder({VARIABLE: str(wanted)})
        assert folder.path.parent == (wanted if wanted == longest else Path("/tmp"))
        assert len(f"{folder.path}/00000000-0000-0000-0000-000000000000") <= 107
        folder.close()


def test_a_folder_that_is_not_there_is_named(short: Path) -> None:
    with pytest.raises(GenerationError, match=rf"{short}/no: .* VLLM_RPC_BASE_PATH"):
        socket_folder({VARIABLE: f"{short}/no"})
