import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.vllm.checkpoint import ModelFolder
from asyncrl.generate.vllm.launch import engine_arguments, environment, socket_folder

SOCKETS = Path("/tmp/sockets")
SOCKETS_IN = "VLLM_RPC_BASE_PATH"
FOLDER = ModelFolder(Path("model"), {}, 64, frozenset(), "float32", "llama", 32, 512)


def test_on_a_cpu_nothing_compiles_and_nothing_spins() -> None:
    added = environment(VLLMEngineConfig(num_threads=2), SOCKETS, on_cpu=True, present={})
    assert added["TORCHDYNAMO_DISABLE"] == "1"
    assert (added["OMP_NUM_THREADS"], added["OMP_WAIT_POLICY"]) == ("2", "PASSIVE")
    assert added["VLLM_CPU_KVCACHE_SPACE"] is None, "a whole number of GiB, which would win over ours"


def test_a_gpu_keeps_its_threads_and_compilation() -> None:
    added = environment(VLLMEngineConfig(), SOCKETS, on_cpu=False, present={"VLLM_LOGGING_LEVEL": "DEBUG"})
    assert not {"TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS"} & added.keys()
    assert added["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert added["VLLM_NO_USAGE_STATS"] == "1"
    assert added["VLLM_RPC_BASE_PATH"] == added["TMPDIR"] == "/tmp/sockets"


def test_arguments_follow_the_config_and_the_folder() -> None:
    config = VLLMEngineConfig(
        num_slots=8, max_sequence_tokens=100, tensor_parallel=2, data_parallel=3, arguments={"swap_space": 1, "seed": 7}
    )
    arguments = engine_arguments(config, FOLDER, on_cpu=False, fp32_head=True)
    assert arguments["dtype"] == "float32", "vLLM's own `auto` would halve it"
    assert (arguments["tensor_parallel_size"], arguments["data_parallel_size"]) == (2, 3)
    assert (arguments["max_num_seqs"], arguments["max_model_len"]) == (9, 101)
    assert (arguments["swap_space"], arguments["seed"]) == (1, 7)
    assert arguments["hf_overrides"] == {"head_dtype": "float32"}
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert "kv_cache_memory_bytes" not in arguments
    assert engine_arguments(config, FOLDER, on_cpu=True)["kv_cache_memory_bytes"] == 1 << 30


def test_what_the_engine_depends_on_cannot_be_overridden() -> None:
    config = VLLMEngineConfig(max_sequence_tokens=100, arguments={"logprobs_mode": "raw_logprobs"})
    with pytest.raises(GenerationError, match="may not set logprobs_mode"):
        engine_arguments(config, FOLDER, on_cpu=False)


def test_sequences_longer_than_the_model_was_made_for_are_refused() -> None:
    with pytest.raises(GenerationError, match="4096; the model was made for 512"):
        engine_arguments(VLLMEngineConfig(), FOLDER, on_cpu=False)


OWNER = """
import os, sys, time
from asyncrl.generate.vllm.launch import socket_folder
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
    folder = socket_folder({SOCKETS_IN: str(short)})
    (folder.path / "socket").touch()
    assert folder.path.parent == short
    folder.close()
    folder.close()
    assert os.listdir(short) == []


def test_what_a_killed_owner_left_is_removed_by_the_next_one_and_not_before_it_is_dead(short: Path) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, SOCKETS_IN: str(short)}) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().decode().strip())
        (left / "socket").touch()
        other = socket_folder({SOCKETS_IN: str(short)})
        assert (left / "socket").exists(), "its owner lives"
        owner.kill()
        owner.wait()
        mine = socket_folder({SOCKETS_IN: str(short)})
        assert not left.exists()
        assert sorted(short.iterdir()) == sorted([other.path, mine.path])
    other.close()
    mine.close()


def test_a_process_that_a_killed_owner_left_is_ended_by_the_next_one_and_no_other_is(short: Path) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, SOCKETS_IN: str(short)}) as owner:
        assert owner.stdout is not None
        left = owner.stdout.readline().decode().strip()
        theirs, stranger = (
            subprocess.Popen(["sleep", "60"], env={**os.environ, SOCKETS_IN: path}) for path in (left, str(short))
        )
        try:
            socket_folder({SOCKETS_IN: str(short)}).close()
            assert theirs.poll() is None, "its owner lives"
            owner.kill()
            owner.wait()
            socket_folder({SOCKETS_IN: str(short)}).close()
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
        folder = socket_folder({SOCKETS_IN: str(wanted)})
        assert folder.path.parent == (wanted if wanted == longest else Path("/tmp"))
        assert len(f"{folder.path}/00000000-0000-0000-0000-000000000000") <= 107
        folder.close()


def test_a_folder_that_is_not_there_is_named(short: Path) -> None:
    with pytest.raises(GenerationError, match=rf"{short}/no: .* VLLM_RPC_BASE_PATH"):
        socket_folder({SOCKETS_IN: f"{short}/no"})
