import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_sockets import VARIABLE, SocketFolder

OWNER = """
import os, sys, time
from asyncrl.generate.vllm_sockets import SocketFolder
print(SocketFolder(os.environ).path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder of a name short enough for sockets, which pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as folder:
        yield Path(folder)


def test_a_closed_folder_is_gone_with_what_was_in_it(short: Path) -> None:
    folder = SocketFolder({VARIABLE: str(short)})
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
        other = SocketFolder({VARIABLE: str(short)})
        assert (left / "socket").exists(), "its owner lives"
        owner.kill()
        owner.wait()
        mine = SocketFolder({VARIABLE: str(short)})
        assert not left.exists()
        assert sorted(short.iterdir()) == sorted([other.path, mine.path])
    other.close()
    mine.close()


def test_sockets_stay_within_the_kernels_107_bytes_however_long_the_folder_for_temporary_files_is(short: Path) -> None:
    longest = short / ("x" * (48 - len(str(short)) - 1))
    for wanted in (longest, short / ("x" * 60)):
        wanted.mkdir()
        folder = SocketFolder({VARIABLE: str(wanted)})
        assert folder.path.parent == (wanted if wanted == longest else Path("/tmp"))
        assert len(f"{folder.path}/00000000-0000-0000-0000-000000000000") <= 107
        folder.close()


def test_a_folder_that_is_not_there_is_named(short: Path) -> None:
    with pytest.raises(GenerationError, match=rf"{short}/no: .* VLLM_RPC_BASE_PATH"):
        SocketFolder({VARIABLE: f"{short}/no"})
