#!/usr/bin/env python
"""Whether a vLLM has what asyncrl's adapter uses of it: names, parameters, fields, flags, routes; read from its source, not run.

    scripts/check_vllm_api.py                      the vLLM that is installed
    scripts/check_vllm_api.py vllm-0.33.0 ...      unpacked source distributions (or wheels)

`USES` is the adapter's own list; what its code says anyway (arguments, environment, bodies of requests) is taken from there. What
only a part of the range has stands in `SINCE`, and must begin in the version that generate/vllm/launch.py names. That a name is
there does not show that it does the same: run the contract (tests/contract, engine `vllm`) before the range grows.

Exits with 1 where something is missing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.generate.engine import EngineRequest, RequestRules
from asyncrl.generate.vllm.checkpoint import ModelFolder
from asyncrl.generate.vllm.launch import engine_arguments, environment, installed_version, parse_version, sampling_arguments
from asyncrl.generate.vllm.server import GenerateBody
from asyncrl.schema.samples import SamplingParams

_CLIENT, _ASYNC = "vllm/v1/engine/core_client.py", "vllm/v1/engine/async_llm.py"
_RUNNERS = ("vllm/v1/worker/gpu_model_runner.py", "vllm/v1/worker/gpu/model_runner.py")
_TOKENS = "vllm/entrypoints/scale_out/token_in_token_out"

USES: dict[str, dict[str, str]] = {
    _ASYNC: {
        "AsyncLLM.from_engine_args": "engine_args stat_loggers",
        "AsyncLLM.generate": "prompt sampling_params request_id",
        "AsyncLLM.abort": "request_id",
        "AsyncLLM.resume_generation": "",
        "AsyncLLM.sleep": "level mode",
        "AsyncLLM.wake_up": "tags",
        "AsyncLLM.shutdown": "timeout",
        "AsyncLLM.errored": "",
        "AsyncLLM.engine_core": "",
        "AsyncLLM.output_handler": "",
        "AsyncLLM.log_stats": "",
        "AsyncLLM.output_processor": "",
        "AsyncLLM.vllm_config": "",
        "AsyncLLM.model_config": "",
    },
    _CLIENT: {
        "AsyncMPClient.pause_scheduler_async": "mode clear_cache",
        "AsyncMPClient.resources": "",
        "AsyncMPClient.core_engines": "",
        "AsyncMPClient._call_utility_async": "method engine",
        "BackgroundResources.ctx": "",
    },
    "vllm/v1/engine/core.py": {
        "EngineCoreProc.pause_scheduler": "mode clear_cache",
        "EngineCore.collective_rpc": "method timeout args kwargs",
    },
    "vllm/v1/engine/output_processor.py": {"OutputProcessor.log_stats": ""},
    "vllm/v1/engine/__init__.py": {"'stop'": "", "'length'": "", "'abort'": ""},
    "vllm/v1/metrics/loggers.py": {
        "StatLoggerBase.record": "scheduler_stats",
        "StatLoggerBase.log": "",
        "StatLoggerBase.log_engine_initialized": "",
        "StatLoggerBase.record_sleep_state": "",
        "'vllm:num_requests_running'": "",
        "'vllm:kv_cache_usage_perc'": "",
        "'vllm:cache_config_info'": "",
    },
    "vllm/v1/metrics/stats.py": {"SchedulerStats.kv_cache_usage": "", "SchedulerStats.num_running_reqs": ""},
    "vllm/outputs.py": {
        "RequestOutput.outputs": "",
        "RequestOutput.finished": "",
        "RequestOutput.prompt_logprobs": "",
        "CompletionOutput.token_ids": "",
        "CompletionOutput.logprobs": "",
        "CompletionOutput.finish_reason": "",
    },
    "vllm/logprobs.py": {"FlatLogprobs.logprobs": "", "FlatLogprobs.start_indices": "", "Logprob.logprob": ""},
    "vllm/sampling_params.py": {"RequestOutputKind.DELTA": ""},
    "vllm/config/__init__.py": {"set_current_vllm_config": ""},
    "vllm/config/vllm.py": {"set_current_vllm_config": "vllm_config", "VllmConfig.cache_config": ""},
    "vllm/config/cache.py": {"CacheConfig.num_gpu_blocks": "", "CacheConfig.block_size": ""},
    "vllm/config/model.py": {
        "ModelConfig.dtype": "",
        "ModelConfig.max_model_len": "",
        "ModelConfig.head_dtype": "",
        "'processed_logprobs'": "",
    },
    "vllm/config/scheduler.py": {"SchedulerConfig.max_num_seqs": ""},
    "vllm/config/parallel.py": {"ParallelConfig.data_parallel_size": ""},
    "vllm/platforms/__init__.py": {"'current_platform'": ""},
    "vllm/platforms/interface.py": {"Platform.is_cpu": ""},
    "vllm/v1/attention/backends/cpu_attn.py": {"CPUAttentionBackend.get_supported_head_sizes": ""},
    "vllm/utils/ompmultiprocessing.py": {"'nobind'": ""},
    "vllm/model_executor/model_loader/reload/__init__.py": {
        "initialize_layerwise_reload": "",
        "finalize_layerwise_reload": "",
    },
    "vllm/model_executor/model_loader/reload/layerwise.py": {
        "initialize_layerwise_reload": "model",
        "finalize_layerwise_reload": "",
        "finalize_layerwise_processing": "model model_config",
        "get_layerwise_info": "layer",
    },
    "vllm/model_executor/model_loader/reload/types.py": {
        "LayerReloadingInfo.can_load": "",
        "LayerReloadingInfo.load_numel": "",
    },
    "vllm/model_executor/layers/vocab_parallel_embedding.py": {
        "ParallelLMHead.quant_method": "",
        "VocabParallelEmbedding.num_org_embeddings_per_partition": "",
        "UnquantizedEmbeddingMethod.process_weights_after_loading": "layer",
    },
    "vllm/model_executor/layers/linear.py": {"UnquantizedLinearMethod": ""},
    "vllm/model_executor/layers/attention/__init__.py": {"'Attention'": ""},
    "vllm/model_executor/layers/attention/attention.py": {"Attention.process_weights_after_loading": ""},
    "vllm/model_executor/layers/fused_moe/fused_moe_method_base.py": {"FusedMoEMethodBase.moe_kernel": ""},
    "vllm/v1/worker/worker_base.py": {
        "WorkerBase.vllm_config": "",
        "WorkerBase.device": "",
        "WorkerBase.model_runner": "",
        "WorkerWrapperBase.init_worker": "",
    },
    **{runner: {f"GPUModelRunner.{name}": "" for name in ("get_model", "kv_caches", "model_config")} for runner in _RUNNERS},
    f"{_TOKENS}/serving.py": {"9999.0": ""},
    "vllm/entrypoints": {
        "/health": "",
        "/version": "",
        "/v1/models": "",
        "'/metrics'": "",
        "/server_info": "config_format",
        "/pause": "mode clear_cache",
        "/resume": "",
        "/collective_rpc": "method args",
        "/inference/v1/generate": "request",
    },
}
"""File or folder: what is used of it, and with which parameters.

In quotes, or a number: a literal in it. With a slash: a route that is handled there. Otherwise a name, or `Class.member`: a
method, a field, or what a method sets on `self`, of a parent class in the same file too.
"""

SINCE: dict[str, dict[str, list[str]]] = {
    "has_weight_versions": {
        "vllm/outputs.py": ["CompletionOutput.weight_versions"],
        _TOKENS + "/protocol.py": ["'weight_versions'"],
        _ASYNC: ["AsyncLLM.update_weight_version"],
        "vllm/entrypoints": ["/update_weight_version"],
    },
}
"""A property in generate/vllm/launch.py to what is there where it is true; elsewhere some of it is missing."""


class Source:
    """An unpacked vLLM.

    Example:
        >>> Source(Path("vllm-0.33.0")).has("vllm/outputs.py", "CompletionOutput.token_ids", ())  # doctest: +SKIP
        True
    """

    def __init__(self, root: Path) -> None:
        """Note where `vllm/` is."""
        self._root = root
        self._texts = cache(lambda path: path.read_text())
        self._trees = cache(lambda path: ast.parse(self._texts(path)))

    def has(self, place: str, use: str, parameters: tuple[str, ...] = ()) -> bool:
        """Return whether the place has what is used, with these parameters."""
        if use.startswith("/"):
            found = [node for tree in self._having(place, use) for node in handlers(tree, use)]
            return any(set(parameters) <= set(literals(node)) for node in found)
        if not use.replace(".", "").isidentifier():
            literal = ast.literal_eval(use)
            return any(literal in literals(tree) for tree in self._having(place, str(literal)))
        names = use.split(".")
        found = [node for tree in self._having(place, names[-1]) for node in members(tree, names)]
        return any(set(parameters) <= parameters_of(node) for node in found)

    def _having(self, place: str, text: str) -> Iterator[ast.Module]:
        """Yield the place's files, parsed, that have a text somewhere."""
        path = self._root / place
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.is_file() else []
        return (self._trees(file) for file in files if text in self._texts(file))


def handlers(tree: ast.AST, route: str) -> Iterator[ast.AST]:
    """Yield functions that a decorator makes answer a route."""
    for node in ast.walk(tree):
        calls = [made for made in getattr(node, "decorator_list", []) if isinstance(made, ast.Call) and made.args]
        if any(isinstance(call.args[0], ast.Constant) and call.args[0].value == route for call in calls):
            yield node


def literals(tree: ast.AST) -> Iterator[object]:
    """Yield strings and numbers, and the names of parameters and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            yield node.value
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def members(tree: ast.AST, path: list[str]) -> Iterator[ast.AST]:
    """Yield what defines a name, or a class's member."""
    body = tree.body if isinstance(tree, ast.Module | ast.ClassDef) else []
    for node in (node for node in body if path[0] in names_of(node)):
        if len(path) == 1:
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from members(node, path[1:])
            yield from set_on_self(node, path[1])
            for base in node.bases:
                yield from members(tree, [ast.unparse(base).split("[")[0], *path[1:]])


def names_of(node: ast.AST) -> set[str]:
    """Return what a statement defines."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name for alias in names}
    return set()


def set_on_self(made: ast.ClassDef, name: str) -> Iterator[ast.AST]:
    """Yield where a class's methods set an attribute."""
    for node in ast.walk(made):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(ast.unparse(target) == f"self.{name}" for target in targets):
            yield node


def parameters_of(node: ast.AST) -> set[str]:
    """Return a function's parameters; none of anything else."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    arguments = node.args
    return {argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}


def from_our_code() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield what asyncrl's own code says it uses: arguments, environment, bodies of requests."""
    folder = ModelFolder(Path("model"), {}, 64, frozenset(), "float32", "llama", 32, 512)
    config = VLLMEngineConfig(max_sequence_tokens=64, kv_cache_gib=1.0)
    for on_cpu in (True, False):
        for name in engine_arguments(config, folder, on_cpu=on_cpu, fp32_head=True):
            yield "vllm/engine/arg_utils.py", f"AsyncEngineArgs.{name}", ()
    for name in environment(config, Path("sockets"), on_cpu=True, present={}):
        if name.startswith("VLLM_"):
            yield "vllm/envs.py", repr(name), ()
    yield "vllm/envs.py", "'VLLM_SERVER_DEV_MODE'", ()
    ours = sampling_arguments(EngineRequest("a", (1,), SamplingParams(max_new_tokens=1), 0), RequestRules(64, 64, frozenset()))
    for name in {*ours, "prompt_logprobs", "flat_logprobs", "output_kind"}:
        yield "vllm/sampling_params.py", f"SamplingParams.{name}", ()
    for name in GenerateBody.__struct_fields__:
        yield f"{_TOKENS}/protocol.py", f"GenerateRequest.{name}", ()


def faults(root: Path, number: str) -> list[str]:
    """Return what this vLLM lacks, or has though the table says it has not."""
    source, version = Source(root), parse_version(number)
    wanted = [(place, use, tuple(names.split())) for place, uses in USES.items() for use, names in uses.items()]
    wanted += from_our_code()
    found = [
        f"{place}: no {use}" + (f" that takes {', '.join(names)}" if names else "")
        for place, use, names in wanted
        if not source.has(place, use, names)
    ]
    for row, places in SINCE.items():
        missing = [f"{place}: no {use}" for place, uses in places.items() for use in uses if not source.has(place, use)]
        if bool(missing) == getattr(version, row):
            found += [f"launch.py says that {row} is {getattr(version, row)}, and it is not", *missing]
    return found


def number_of(root: Path) -> str:
    """Return the version that an unpacked distribution bears."""
    metadata = next(iter([*root.glob("PKG-INFO"), *root.glob("vllm*.dist-info/METADATA")]), None)
    lines = metadata.read_text().splitlines() if metadata is not None else []
    found = [line.removeprefix("Version: ") for line in lines if line.startswith("Version: ")]
    if not found:
        raise SystemExit(f"{root} is no unpacked vLLM: it has neither PKG-INFO nor vllm-*.dist-info/METADATA")
    return found[0]


def main(arguments: list[str]) -> int:
    """Check each folder; return the exit status."""
    trees = [(Path(argument), number_of(Path(argument))) for argument in arguments]
    if not trees:
        installed = find_spec("vllm")
        if installed is None or not installed.submodule_search_locations:
            raise SystemExit("vLLM is not installed here: name unpacked distributions of it")
        trees = [(Path(installed.submodule_search_locations[0]).parent, installed_version().number)]
    status = 0
    for root, number in trees:
        found = faults(root, number)
        print(f"vLLM {number} ({root}): {'all there' if not found else f'{len(found)} faults'}", *found, sep="\n  ")
        status |= bool(found)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
