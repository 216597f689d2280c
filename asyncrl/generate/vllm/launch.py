"""Starts vLLM's processes and ends them: their environment, their arguments, and what a killed one leaves behind.

Invariants: vllm is imported here for the first time, on a thread. The environment it needs is set while its processes are
started and put back afterwards. Whatever `shut_down` returns from, no process that was started is alive.

The sockets by which an engine's processes talk lie in a folder of its own. Three may remove it: its owner, vLLM's workers,
which outlive a killed owner by a moment (worker_extension.py), and whoever opens the next one here, where all were killed at
once. What such an engine left running is ended then, for it would keep the device's memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.errors import GenerationError
from asyncrl.folders import OwnedFolder

if TYPE_CHECKING:
    from asyncrl.generate.vllm.checkpoint import ModelFolder

EXTENSION = "asyncrl.generate.vllm.worker_extension.WeightsExtension"
_GIB = 1 << 30
_CPU_BLOCK_TOKENS = 32
"""Of the KV cache; vLLM's own choice on a CPU is 128, and only whole blocks of a prompt are shared."""
_GRACE_S = 5.0
_DEAD_GRACE_S = 1.0
"""For what a dead engine core left: a successor waits for it."""
_STOP_S = 1.5
"""For vLLM's engine core to end by itself."""
_SOCKETS = "VLLM_RPC_BASE_PATH"
_PREFIX = "asyncrl-vllm-"
_LONGEST_SOCKET_FOLDER = 107 - len("/") - 36 - len("/") - len(_PREFIX) - 8
"""Bytes: the kernel's limit for a socket, less its name, which is a UUID, and that of the folder in which it lies."""
_TRACKER = "multiprocessing.resource_tracker"
"""Its process ends with those it works for, and removes the shared memory that they leave."""

_RING = re.compile(r"/dev/shm/psm_\w+$", re.MULTILINE)  # noqa: S108 - vLLM's

_QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_OURS = frozenset(
    {
        "model", "logprobs_mode", "worker_extension_cls", "skip_tokenizer_init", "stream_interval", "max_model_len",
        "max_num_seqs", "tensor_parallel_size", "data_parallel_size", "enable_prefix_caching", "disable_log_stats",
    }
)  # fmt: skip


def environment(config: VLLMEngineConfig, sockets: Path, *, on_cpu: bool, present: Mapping[str, str]) -> dict[str, str | None]:
    """Return what vLLM's processes need in their environment beside what is `present`; None: it must not be there.

    On a CPU nothing is compiled (the first request with logprobs would wait 40 s for it) and threads neither spin nor are bound:
    other processes of the run have the same cores. The file by which ranks find each other, which vLLM leaves behind, lies with
    the sockets. Whoever finds that folder left knows the processes by it (`processes_of`), so their titles are not written over
    their environment (SPT_NOENV).
    """
    added: dict[str, str | None] = {**_QUIET, _SOCKETS: str(sockets), "TMPDIR": str(sockets), "SPT_NOENV": "1"}
    added["VLLM_LOGGING_LEVEL"] = present.get("VLLM_LOGGING_LEVEL", "WARNING")
    if on_cpu:
        added |= {
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": str(config.num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_CPU_OMP_THREADS_BIND": present.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
            "VLLM_CPU_KVCACHE_SPACE": None,
        }
    return added


def engine_arguments(config: VLLMEngineConfig, folder: ModelFolder, *, on_cpu: bool, fp32_head: bool = False) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs.

    Raises:
        GenerationError: `generate.engine` asks for what cannot be.
    """
    if refused := sorted(_OURS & config.arguments.keys()):
        raise GenerationError(f"generate.engine.arguments may not set {', '.join(refused)}: the engine depends on them")
    limit = config.max_sequence_tokens
    if folder.max_positions and limit > folder.max_positions:
        raise GenerationError(
            f"generate.engine.max_sequence_tokens is {limit}; the model was made for {folder.max_positions} positions: "
            f"set it to at most that"
        )
    arguments: dict[str, Any] = {
        "model": str(folder.path),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "trust_remote_code": folder.trust_remote_code,
        "dtype": folder.dtype if config.dtype == "auto" else config.dtype,
        # One more than a request may have, where the model allows it: vLLM wants room for a token when it only scores.
        "max_model_len": min(limit + 1, folder.max_positions or limit + 1),
        # One more than are given out, for what must not wait: a score, and a request that follows one about to end.
        "max_num_seqs": config.num_slots + 1,
        "tensor_parallel_size": config.tensor_parallel,
        "data_parallel_size": config.data_parallel,
        "gpu_memory_utilization": config.gpu_memory_share,
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": config.enforce_eager or on_cpu,
        "enable_sleep_mode": config.sleep,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
    }
    kv_gib = config.kv_cache_gib or (1.0 if on_cpu else 0.0)
    if kv_gib:
        arguments["kv_cache_memory_bytes"] = int(kv_gib * _GIB)
    if on_cpu:
        arguments["block_size"] = _CPU_BLOCK_TOKENS
    if fp32_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    return arguments | config.arguments


def launch(
    config: VLLMEngineConfig,
    folder: ModelFolder,
    watch: Callable[..., Any],
    sockets: Path,
    *,
    fp32_head: bool = False,
) -> Any:  # noqa: ANN401 - vLLM's AsyncLLM
    """Import vLLM, start its processes, load the model; slow, run it on a thread.

    Args:
        config: `generate.engine`.
        folder: The model's.
        watch: vLLM's stat-logger factory: called with its config and the engine's number.
        sockets: Folder of the sockets by which its processes talk.
        fp32_head: Of `model` in the run's config.

    Returns:
        The AsyncLLM; its tasks begin on the event loop that first uses it.

    Raises:
        GenerationError: It did not start; nothing of it is left.
    """
    try:
        on_cpu = is_on_cpu(config)
        arguments = engine_arguments(config, folder, on_cpu=on_cpu, fp32_head=fp32_head)
        with _environment(environment(config, sockets, on_cpu=on_cpu, present=os.environ)):
            if on_cpu:
                _check_head_size(folder)
            made = import_module("vllm.engine.arg_utils").AsyncEngineArgs(**arguments)
            return import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(made, stat_loggers=[watch])
    except Exception as error:
        end(processes_of(sockets))
        if isinstance(error, GenerationError):
            raise
        raise GenerationError(f"vLLM did not start: {type(error).__name__}: {error}") from error


def processes_of(sockets: Path, *, orphaned: bool = False) -> set[psutil.Process]:
    """Return the processes of an engine, which were told its folder; its cores are the direct children of this process.

    Args:
        sockets: The engine's folder.
        orphaned: Its owner is gone: look everywhere, and not only below this process.
    """
    found: set[psutil.Process] = set()
    for process in psutil.process_iter() if orphaned else psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_SOCKETS) == str(sockets) and _TRACKER not in " ".join(process.cmdline()):
                found.add(process)
    return found


def shut_down(llm: Any, processes: set[psutil.Process]) -> None:  # noqa: ANN401
    """End an AsyncLLM and wait for its processes; slow, run it on a thread."""
    # vLLM's own 5 s, an interpreter's teardown after them, are past what a run grants its processes; a killed core frees as much.
    rings: set[Path] = set()  # by which cores and workers talk: a core that is not given the time to end leaves them
    for process in processes:
        with contextlib.suppress(OSError):
            rings |= {Path(path) for path in _RING.findall(Path(f"/proc/{process.pid}/maps").read_text())}
    if llm.output_handler is not None:  # it would log the end of the core as a death
        llm.output_handler.get_loop().call_soon_threadsafe(llm.output_handler.cancel)
    try:
        llm.shutdown(timeout=_STOP_S)
    finally:
        end(processes, _DEAD_GRACE_S if llm.errored else _GRACE_S)
        for ring in rings:
            if ring.exists():
                ring.unlink(missing_ok=True)
                resource_tracker.unregister(f"/{ring.name}", "shared_memory")


def end(processes: set[psutil.Process], grace_s: float = _GRACE_S) -> None:
    """Wait a little for processes, then kill those that are left."""
    left = psutil.wait_procs(list(processes), timeout=grace_s)[1]
    kill(left)
    psutil.wait_procs(left, timeout=_GRACE_S)


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def is_on_cpu(config: VLLMEngineConfig) -> bool:
    """Import vLLM and say which device it was built for."""
    with _environment({**_QUIET, "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")}):
        on_cpu = bool(import_module("vllm.platforms").current_platform.is_cpu())
    if config.device != "auto" and on_cpu != (config.device == "cpu"):
        raise GenerationError(
            f"generate.engine.device is {config.device!r}, the vLLM that is installed runs on {'a CPU' if on_cpu else 'a GPU'}: "
            f"see docs/vllm.md for the build that fits, or set device = 'auto'"
        )
    return on_cpu


def _check_head_size(folder: ModelFolder) -> None:
    """Refuse what vLLM's attention on a CPU would end its process over, at the first request."""
    allowed = import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend.get_supported_head_sizes()
    if folder.head_size and folder.head_size not in allowed:
        raise GenerationError(
            f"vLLM on a CPU cannot run attention heads of size {folder.head_size}; it takes {', '.join(map(str, allowed))}: "
            f"choose another hidden_size / num_heads, or generate.engine.kind = 'transformers'"
        )


@contextlib.contextmanager
def _environment(added: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for a while; what vLLM sets meanwhile is put back too."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in added.items() if value is not None})
    for name in added.keys() - {name for name, value in added.items() if value is not None}:
        os.environ.pop(name, None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in set(os.environ) - before.keys():
            del os.environ[name]
        os.environ.update(before)


def socket_folder(present: Mapping[str, str]) -> OwnedFolder:
    """Make a folder for the sockets of one engine, after removing what others left, and ending what runs there.

    Args:
        present: This process's environment; where it says where vLLM's sockets go, the folder is there.

    Raises:
        GenerationError: It cannot be made.
    """
    usual = tempfile.gettempdir()  # asked first: Python remembers what it is told, and vLLM's processes are told another
    wanted = present.get(_SOCKETS) or usual
    is_short = len(os.fsencode(wanted)) <= _LONGEST_SOCKET_FOLDER
    parent = Path(wanted if is_short else "/tmp")  # noqa: S108 - the folder in it has a name of its own and mode 0700
    try:
        return OwnedFolder(_PREFIX, parent, lambda left: kill(processes_of(left, orphaned=True)))
    except OSError as error:
        raise GenerationError(
            f"there is no place for vLLM's sockets in {parent}: {error}; name a folder in {_SOCKETS} or TMPDIR"
        ) from error
