"""Config of generators: engines (variants by the tag `kind`), sampling, and how new weights are taken."""

from __future__ import annotations

from typing import ClassVar, Literal

from asyncrl.config import (
    BoundedInt,
    Device,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Processes,
    ProcessesOrNone,
    _Stage,
    _Variant,
)

LOWEST_VLLM_TEMPERATURE = 0.01
"""vLLM raises lower ones, except 0, to this one."""
VLLM_CPU_BLOCK_TOKENS = 32
"""Tokens per block of vLLM's KV cache on a CPU. Its default is 128, and only whole blocks of a prompt are shared."""
UNCHOSEN_SLOTS = 32
"""Number of slots of an engine with `num_slots = "auto"` outside a run."""


class _Engine(_Variant, frozen=True):
    """Properties that every engine's config declares; other code reads these properties and never asks for the kind."""

    has_model: ClassVar[bool] = True
    """It computes with a model: new weights can be checked by a probe, and a device can be shared."""
    needs_folder: ClassVar[bool] = True
    """It reads the model's folder, for the model or for the tokenizer."""
    replays: ClassVar[bool] = False
    """It returns a task's own answers: nothing is generated, and no weights are taken."""
    receives: ClassVar[bool] = False
    """It can run the receiving end of a medium that delivers into the model's own process or device."""
    adopts: ClassVar[bool] = False
    """Its model lives in the generator's own process and can be the learner's parameters themselves."""
    is_remote: ClassVar[bool] = False
    """It is a server that the run does not start."""

    @property
    def slots(self) -> int:
        """`num_slots` as a number, also while `auto` is not resolved yet."""
        given = getattr(self, "num_slots", 0)
        return UNCHOSEN_SLOTS if given == "auto" else int(given)

    @property
    def device_name(self) -> str:
        """The engine's `device`, if it has one."""
        return str(getattr(self, "device", ""))

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of servers that the run does not start, one per generator."""
        return tuple(url.strip() for url in str(getattr(self, "url", "")).split(",") if url.strip())

    def gpus(self, learner_gpu: int | None) -> tuple[int, ...]:  # noqa: ARG002 - for those that go where the learner is
        """Return the numbers of the GPUs that the engine uses; empty if it uses none.

        Args:
            learner_gpu: The learner's GPU, which `device = "auto"` takes too; None: the learner has none.
        """
        gpu = gpu_of(self.device_name)
        return () if gpu is None else (gpu,)


class TransformersEngineConfig(_Engine, frozen=True, tag="transformers"):
    """The built-in engine: continuous batching in slots, on a transformers causal LM."""

    receives: ClassVar[bool] = True
    adopts: ClassVar[bool] = True

    num_slots: BoundedInt | Literal["auto"] = "auto"
    """Maximum number of requests that run at once. `auto`: a generator's part of one step's samples, or fewer if their KV cache
    does not fit into a quarter of the memory."""
    max_sequence_tokens: PositiveInt = 512
    """Prompt and response together; longer requests are refused."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """`auto`: bfloat16 if the device supports it in hardware, else float32."""
    device: Device = "cpu"
    num_threads: Processes = 1


class VLLMEngineConfig(_Engine, frozen=True, tag="vllm"):
    """vLLM's AsyncLLM, with engine core and workers in separate processes. Needs the extra `vllm`; on a CPU see docs/vllm.md."""

    receives: ClassVar[bool] = True

    max_sequence_tokens: PositiveInt = 4096
    """Prompt and response together; longer requests are refused. vLLM's `max_model_len`."""
    num_slots: BoundedInt = 256
    """Maximum number of requests that run at once, however much KV cache is free. vLLM's `max_num_seqs`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    tensor_parallel: Processes = 1
    data_parallel: Processes = 1
    gpu_memory_share: Fraction = 0.9
    """Share of a GPU's memory that the engine may use. vLLM's `gpu_memory_utilization`."""
    kv_cache_gib: NonNegativeFloat = 0.0
    """KV cache of each GPU or rank; 0: 1 GiB on a CPU, and the rest of `gpu_memory_share` on a GPU."""
    prefix_caching: bool = True
    """Shared prompts are computed once; never across versions."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation."""
    sleep: bool = False
    """Enable vLLM's sleep mode (GPU only); placements that share a device need it."""
    num_threads: Processes = 1
    """Number of threads on a CPU."""
    arguments: dict[str, str | int | float | bool] = {}
    """Further arguments of vLLM's AsyncEngineArgs, by name."""

    def gpus(self, learner_gpu: int | None) -> tuple[int, ...]:
        """Return the GPU numbers of its ranks; see `_Engine.gpus`."""
        on_gpu = self.device == "cuda" or (self.device == "auto" and learner_gpu is not None)
        return tuple(range(self.tensor_parallel * self.data_parallel)) if on_gpu else ()


class VLLMServerEngineConfig(_Engine, frozen=True, tag="vllm_server"):
    """An existing `vllm serve`, used over HTTP: token ids in and out, pause, weights."""

    is_remote: ClassVar[bool] = True

    url: str = ""
    """URL of the server, http://host:port. With several generators, one URL for each, separated by commas."""
    max_sequence_tokens: PositiveInt = 4096
    """Prompt and response together; at most the server's `max_model_len`."""
    num_slots: BoundedInt = 256
    api_key_file: str = ""
    """File whose first line is sent as bearer token; empty: no token is sent."""
    shared_folder: str = ""
    """Folder for the weights, at the same path for generator and server; empty: the server runs on this machine."""
    start_timeout_s: PositiveFloat = 120.0
    """How long a starting generator waits until the server is healthy."""
    request_timeout_s: PositiveFloat = 600.0
    """Timeout of requests other than completions, including new weights."""


class FakeEngineConfig(_Engine, frozen=True, tag="fake"):
    """No model: deterministic tokens, configured lengths and latencies, to load-test everything else."""

    has_model: ClassVar[bool] = False
    needs_folder: ClassVar[bool] = False

    num_slots: BoundedInt = 32
    max_sequence_tokens: PositiveInt = 4096
    token_latency_s: NonNegativeFloat = 0.001
    """Time of one decode step of the whole batch."""
    length_distribution: Literal["fixed", "uniform", "lognormal"] = "lognormal"
    mean_tokens: PositiveFloat = 64.0
    sigma: PositiveFloat = 1.0
    """Standard deviation of the logarithm of a log-normal length."""
    vocabulary_size: PositiveInt = 64
    kv_blocks: NonNegativeInt = 0
    """Number of simulated KV blocks of 16 tokens: requests start only if blocks are free, and the generator's number of slots
    follows the free blocks. 0: unlimited."""


class ReplayEngineConfig(_Engine, frozen=True, tag="replay"):
    """Returns the chosen and rejected answers of a preferences task instead of generating: offline DPO in the same pipeline."""

    has_model: ClassVar[bool] = False
    replays: ClassVar[bool] = True

    num_slots: BoundedInt = 256
    max_sequence_tokens: PositiveInt = 2048
    """Prompt and answer together; a longer pair becomes a failed group, with the reason."""


EngineConfig = TransformersEngineConfig | VLLMEngineConfig | VLLMServerEngineConfig | FakeEngineConfig | ReplayEngineConfig


def gpu_of(device: str) -> int | None:
    """Return the number of a CUDA device (`cuda` is 0), or None for any other device."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" and (number or "0").isdigit() else None


class SamplingConfig(_Stage, frozen=True):
    """How training samples are generated."""

    max_new_tokens: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    top_k: NonNegativeInt = 0
    """0 switches it off."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids that end a response, in addition to the model's own end-of-sequence ids. Such a token is part of the response."""


class GenerateConfig(_Stage, frozen=True):
    """Generators and how new weights reach requests in flight."""

    num_workers: ProcessesOrNone = 2
    """0: only outside code submits samples."""
    engine: EngineConfig = TransformersEngineConfig()
    model_folder: str = ""
    """The model's folder on generators' machines, if they do not share the learner's folders; empty: the learner's folder."""
    sampling: SamplingConfig = SamplingConfig()
    kv: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of requests in flight when new weights arrive. If phases take turns, `keep` moves it to host
    memory while others use the device (vLLM recomputes it in that case)."""
    in_flight_updates: bool = True
    """False: a generator loads new weights only while no request is running."""
