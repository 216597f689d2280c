"""What generators are told: engines, variants by the tag `kind`, and how they sample and take new weights."""

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

UNCHOSEN_SLOTS = 32
"""Of an engine whose `num_slots` is `auto` outside of a run."""


class _Engine(_Variant, frozen=True):
    """What every engine's config says about its kind; the rest of the program asks this and not which kind it is."""

    has_model: ClassVar[bool] = True
    """It computes with a model: new weights can be checked by a probe, and a device can be shared."""
    needs_folder: ClassVar[bool] = True
    """It reads the model's folder, for the model or for the tokenizer."""
    replays: ClassVar[bool] = False
    """It gives back a task's own answers: nothing is generated, and no weights are taken."""
    receives: ClassVar[bool] = False
    """It can run the receiving end of a medium that ends in the model's own process or device."""
    adopts: ClassVar[bool] = False
    """Its model lives in the generator's own process and can be the learner's parameters themselves."""
    is_remote: ClassVar[bool] = False
    """It is a server that the run does not start."""

    @property
    def slots(self) -> int:
        """`num_slots` as a number, also while nothing was chosen for `auto`."""
        given = getattr(self, "num_slots", 0)
        return UNCHOSEN_SLOTS if given == "auto" else int(given)

    @property
    def device_name(self) -> str:
        """`device`, where it has one."""
        return str(getattr(self, "device", ""))

    @property
    def urls(self) -> tuple[str, ...]:
        """Servers that the run does not start, one a generator."""
        return tuple(url.strip() for url in str(getattr(self, "url", "")).split(",") if url.strip())

    def gpus(self, learner_gpu: int | None) -> tuple[int, ...]:  # noqa: ARG002 - for those that go where the learner is
        """Return the numbers of the GPUs that it takes; none without one.

        Args:
            learner_gpu: Of the learner, which `device = "auto"` follows; None: it has none.
        """
        gpu = gpu_of(self.device_name)
        return () if gpu is None else (gpu,)


class TransformersEngineConfig(_Engine, frozen=True, tag="transformers"):
    """The embedded engine: continuous batching in slots over a transformers causal LM."""

    receives: ClassVar[bool] = True
    adopts: ClassVar[bool] = True

    num_slots: BoundedInt | Literal["auto"] = "auto"
    """Most requests that run at once. `auto`: a generator's part of one step's samples, as far as a quarter of the memory holds
    their KV cache."""
    max_sequence_tokens: PositiveInt = 512
    """Prompt and response together; longer requests are refused."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """`auto`: bfloat16 where the device multiplies it in hardware, float32 elsewhere."""
    device: Device = "cpu"
    num_threads: Processes = 1


class VLLMEngineConfig(_Engine, frozen=True, tag="vllm"):
    """vLLM's AsyncLLM, its engine core and workers in processes of their own. Extra `vllm`; on a CPU see docs/vllm.md."""

    receives: ClassVar[bool] = True

    max_sequence_tokens: PositiveInt = 4096
    """Prompt and response together; longer requests are refused. vLLM's `max_model_len`."""
    num_slots: BoundedInt = 256
    """Most requests that run at once, however much KV cache is free. vLLM's `max_num_seqs`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    tensor_parallel: Processes = 1
    data_parallel: Processes = 1
    gpu_memory_share: Fraction = 0.9
    """Of a GPU's memory that the engine may use. vLLM's `gpu_memory_utilization`."""
    kv_cache_gib: NonNegativeFloat = 0.0
    """KV cache of each of its GPUs or ranks; 0: 1 GiB on a CPU, and what is left of `gpu_memory_share` on a GPU."""
    prefix_caching: bool = True
    """Shared prompts are computed once; never across versions."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation."""
    sleep: bool = False
    """Let it sleep (GPU only); placements that share a device need it."""
    num_threads: Processes = 1
    """On a CPU."""
    arguments: dict[str, str | int | float | bool] = {}
    """Further arguments of vLLM's AsyncEngineArgs, by their names there."""

    def gpus(self, learner_gpu: int | None) -> tuple[int, ...]:
        """Return the numbers of its ranks' devices; see `_Engine.gpus`."""
        on_gpu = self.device == "cuda" or (self.device == "auto" and learner_gpu is not None)
        return tuple(range(self.tensor_parallel * self.data_parallel)) if on_gpu else ()


class VLLMServerEngineConfig(_Engine, frozen=True, tag="vllm_server"):
    """A running `vllm serve` elsewhere, over HTTP: token ids in and out, pause, weights."""

    is_remote: ClassVar[bool] = True

    url: str = ""
    """Of the server: http://host:port. With several generators, one for each, separated by commas."""
    max_sequence_tokens: PositiveInt = 4096
    """Not more than the server's `max_model_len`."""
    num_slots: BoundedInt = 256
    api_key_file: str = ""
    """File whose first line is sent as bearer token; empty: none is sent."""
    shared_folder: str = ""
    """Folder that generator and server both see under this path, for the weights; empty: the server runs on this machine."""
    start_timeout_s: PositiveFloat = 120.0
    """How long a generator that starts waits for the server to be healthy."""
    request_timeout_s: PositiveFloat = 600.0
    """For an answer (new weights, too) that is no completion."""


class FakeEngineConfig(_Engine, frozen=True, tag="fake"):
    """No model: deterministic tokens, scripted lengths and latencies; load-tests everything else."""

    has_model: ClassVar[bool] = False
    needs_folder: ClassVar[bool] = False

    num_slots: BoundedInt = 32
    max_sequence_tokens: PositiveInt = 4096
    token_latency_s: NonNegativeFloat = 0.001
    """One decode step of the whole batch."""
    length_distribution: Literal["fixed", "uniform", "lognormal"] = "lognormal"
    mean_tokens: PositiveFloat = 64.0
    sigma: PositiveFloat = 1.0
    """Of the log-normal's logarithm."""
    vocabulary_size: PositiveInt = 64
    kv_blocks: NonNegativeInt = 0
    """Make-believe KV blocks of 16 tokens: no request starts without room, and the generator's room follows those that are free.
    0: no end of them."""


class ReplayEngineConfig(_Engine, frozen=True, tag="replay"):
    """Gives back the chosen and rejected answers of a preferences task instead of generating: offline DPO, same pipeline."""

    has_model: ClassVar[bool] = False
    replays: ClassVar[bool] = True

    num_slots: BoundedInt = 256
    max_sequence_tokens: PositiveInt = 2048
    """Prompt and answer together; a longer pair is a failed group, with the reason."""


EngineConfig = TransformersEngineConfig | VLLMEngineConfig | VLLMServerEngineConfig | FakeEngineConfig | ReplayEngineConfig


def gpu_of(device: str) -> int | None:
    """Return the number of a CUDA device, None of any other; `cuda` is the first."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" and (number or "0").isdigit() else None


class SamplingConfig(_Stage, frozen=True):
    """How training samples are drawn."""

    max_new_tokens: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    top_k: NonNegativeInt = 0
    """0 switches it off."""


class GenerateConfig(_Stage, frozen=True):
    """Generators and how new weights reach requests in flight."""

    num_workers: ProcessesOrNone = 2
    """0: only outside code submits samples."""
    engine: EngineConfig = TransformersEngineConfig()
    model_folder: str = ""
    """Where generators find the model; empty: where the learner says. For machines that do not share the learner's folders."""
    sampling: SamplingConfig = SamplingConfig()
    kv: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of requests in flight when new weights come in; where phases take turns, `keep` has it in host
    memory while others have the device (vLLM computes it anew then)."""
    in_flight_updates: bool = True
    """False: a generator takes new weights only between requests."""
