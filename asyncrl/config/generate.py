"""What generators are told: engines, variants by the tag `kind`, and how they sample and take new weights."""

from __future__ import annotations

from typing import Literal

from asyncrl.config.fields import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, _Stage, _Variant


class TransformersEngineConfig(_Variant, frozen=True, tag="transformers"):
    """The embedded engine: continuous batching in slots over a transformers causal LM."""

    num_slots: PositiveInt = 32
    max_sequence_tokens: PositiveInt = 512
    """Prompt and response together; longer requests are refused."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    num_threads: PositiveInt = 1


class VLLMEngineConfig(_Variant, frozen=True, tag="vllm"):
    """vLLM's AsyncLLM, its engine core and workers in processes of their own. Extra `vllm`; on a CPU see docs/vllm.md."""

    max_sequence_tokens: PositiveInt = 4096
    """Prompt and response together; longer requests are refused. vLLM's `max_model_len`."""
    num_slots: PositiveInt = 256
    """Most requests that run at once, however much KV cache is free. vLLM's `max_num_seqs`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    tensor_parallel: PositiveInt = 1
    data_parallel: PositiveInt = 1
    gpu_memory_share: Fraction = 0.9
    """Of a GPU's memory that the engine may use. vLLM's `gpu_memory_utilization`."""
    kv_cache_gib: NonNegativeFloat = 0.0
    """KV cache on a CPU; 0: 1 GiB there, and what is left of `gpu_memory_share` on a GPU."""
    prefix_caching: bool = True
    """Shared prompts are computed once; never across versions."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation."""
    sleep: bool = False
    """Make sleep levels available (GPU only); placements that share a device need it."""
    num_threads: PositiveInt = 1
    """On a CPU."""
    arguments: dict[str, str | int | float | bool] = {}
    """Further arguments of vLLM's AsyncEngineArgs, by their names there."""


class VLLMServerEngineConfig(_Variant, frozen=True, tag="vllm_server"):
    """A running `vllm serve` elsewhere, over HTTP: token ids in and out, pause, weights."""

    url: str = ""
    """Of the server: http://host:port. With several generators, one for each, separated by commas."""
    max_sequence_tokens: PositiveInt = 4096
    """Not more than the server's `max_model_len`."""
    num_slots: PositiveInt = 256
    api_key_file: str = ""
    """File whose first line is sent as bearer token; empty: none is sent."""
    shared_folder: str = ""
    """Folder that generator and server both see under this path, for the weights; empty: the server runs on this machine."""
    start_timeout_s: PositiveFloat = 120.0
    """How long a generator that starts waits for the server to be healthy."""
    request_timeout_s: PositiveFloat = 600.0
    """For an answer (new weights, too), and for the next token of a request while nothing is paused."""

    @property
    def urls(self) -> tuple[str, ...]:
        """One a generator."""
        return tuple(url.strip() for url in self.url.split(",") if url.strip())


class FakeEngineConfig(_Variant, frozen=True, tag="fake"):
    """No model: deterministic tokens, scripted lengths and latencies; load-tests everything else."""

    num_slots: PositiveInt = 32
    max_sequence_tokens: PositiveInt = 4096
    token_latency_s: NonNegativeFloat = 0.001
    """One decode step of the whole batch."""
    length_distribution: Literal["fixed", "uniform", "lognormal"] = "lognormal"
    mean_tokens: PositiveFloat = 64.0
    sigma: PositiveFloat = 1.0
    """Of the log-normal's logarithm."""
    vocabulary_size: PositiveInt = 64
    load_latency_s: NonNegativeFloat = 0.0
    fail_every: NonNegativeInt = 0
    """Every n-th request fails; 0 switches it off."""
    kv_blocks: NonNegativeInt = 0
    """Make-believe KV blocks of 16 tokens: no request starts without room, and the generator's room follows those that are free.
    0: no end of them."""


class ReplayEngineConfig(_Variant, frozen=True, tag="replay"):
    """Gives back the chosen and rejected answers of a preferences task instead of generating: offline DPO, same pipeline."""

    num_slots: PositiveInt = 256
    max_sequence_tokens: PositiveInt = 2048
    """Prompt and answer together; a longer pair is a failed group, with the reason."""


EngineConfig = TransformersEngineConfig | VLLMEngineConfig | VLLMServerEngineConfig | FakeEngineConfig | ReplayEngineConfig


class SamplingConfig(_Stage, frozen=True):
    """How training samples are drawn."""

    max_new_tokens: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    top_k: NonNegativeInt = 0
    """0 switches it off."""


class GenerateConfig(_Stage, frozen=True):
    """Generators and how new weights reach requests in flight."""

    num_workers: NonNegativeInt = 2
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
