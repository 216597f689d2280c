"""What each stage is told. One struct a stage; variants by the tag `kind`; every knob has one owner."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class _Stage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every config struct has in common."""


class _Variant(_Stage, frozen=True, tag_field="kind"):
    """One of several under the same field, told apart by `kind`."""


# -- model ---------------------------------------------------------------------------------------------------------------


class WarmStart(_Stage, frozen=True):
    """A short supervised training before version 0, on the task's own worked examples (train split only)."""

    steps: PositiveInt
    """At most this many; the learning rate's schedule is laid over them."""
    until_accuracy: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Stop once the model gives the worked answer with this probability, mean of the last 8 batches; 0: never early."""
    batch_size: PositiveInt = 256
    learning_rate: PositiveFloat = 1e-3


class ScratchModel(_Variant, frozen=True, tag="scratch"):
    """A small Llama with random weights and a character tokenizer, made when the run starts."""

    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt | None = None
    """None: as many as `num_heads`."""
    intermediate_size: PositiveInt | None = None
    """None: 4 x hidden_size."""
    max_positions: PositiveInt = 512
    tie_embeddings: bool = True
    fp32_head: bool = False
    """The output layer runs in float32, in the learner and in the engine alike (one side alone is worse than none)."""
    warm_start: WarmStart | None = None


class PretrainedModel(_Variant, frozen=True, tag="pretrained"):
    """Any Hugging Face causal language model in a local folder."""

    path: str
    """Folder with config.json, safetensors and tokenizer; `asyncrl model import` makes one from a GGUF."""
    trust_remote_code: bool = False
    fp32_head: bool = False
    """The output layer runs in float32, in the learner and in the engine alike (one side alone is worse than none)."""


ModelConfig = ScratchModel | PretrainedModel

# -- tasks ---------------------------------------------------------------------------------------------------------------


class AdditionTask(_Variant, frozen=True, tag="addition"):
    """`12+34=` -> `46`, all pairs of numbers of `digits` digits, split by seed; the smallest task that shows learning."""

    digits: Annotated[int, Meta(ge=1, le=4)] = 2
    held_out: PositiveInt = 512
    """Pairs that are never trained on, in the warm start neither."""


class ReasoningGymTask(_Variant, frozen=True, tag="reasoning_gym"):
    """A reasoning-gym family, strict scoring (0.99 and above is right), duplicates removed, held-out split."""

    family: str = "chain_sum"
    family_options: dict[str, int | float | str | bool | list[int | float | str]] = {}
    size: PositiveInt = 2000
    """Problems generated before duplicates are removed."""
    held_out: PositiveInt = 200
    shots: NonNegativeInt = 3
    """Worked examples shown as chat turns before the problem, taken from neither split."""
    system_prompt: str = ""


class JsonlTask(_Variant, frozen=True, tag="jsonl"):
    """One JSON object a line; any file of prompts and answers."""

    path: str
    prompt_field: str = "question"
    answer_field: str = "answer"
    answer_regex: str = ""
    """Where given, its first group taken from the answer field is the reference answer (GSM8K: `#### (.+)`)."""
    held_out_path: str = ""
    """Empty: `held_out` lines are taken from `path`, by seed."""
    held_out: NonNegativeInt = 200
    shots: NonNegativeInt = 0
    system_prompt: str = ""
    chat: bool = True
    """False: the prompt field is the text itself."""


class PreferencesTask(_Variant, frozen=True, tag="preferences"):
    """A file of preferences, one JSON object a line: prompt, chosen and rejected answer. Trained offline by DPO."""

    path: str
    prompt_field: str = "prompt"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    held_out: NonNegativeInt = 0
    system_prompt: str = ""
    chat: bool = True
    """False: the prompt field is the text itself."""


class PythonTask(_Variant, frozen=True, tag="python"):
    """A user's own task: `module:function`, called with the run's seed, returns a `TaskData`."""

    path: str


TaskConfig = AdditionTask | ReasoningGymTask | JsonlTask | PreferencesTask | PythonTask

# -- generate ------------------------------------------------------------------------------------------------------------


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
    """What happens to the KV cache of requests in flight when new weights come in."""
    in_flight_updates: bool = True
    """False: a generator takes new weights only between requests."""


# -- reward --------------------------------------------------------------------------------------------------------------


class AnswerMatchReward(_Variant, frozen=True, tag="answer_match"):
    """1 when the extracted answer equals the reference, else 0."""

    mode: Literal["exact", "numeric", "regex", "math"] = "exact"
    """`math` is math-verify; `regex` full-matches the reference as a pattern."""
    extract: str = ""
    """Regex whose first group (last match) is the answer; empty: the whole completion, stripped."""
    tolerance: NonNegativeFloat = 1e-6
    """Only `numeric`: largest difference allowed, relative to max(1, |reference|)."""
    weight: float = 1.0
    name: str = ""


class FormatCheckReward(_Variant, frozen=True, tag="format_check"):
    """1 when the whole completion matches the pattern, else 0."""

    pattern: str
    weight: float = 1.0
    name: str = ""


class CodeExecReward(_Variant, frozen=True, tag="code_exec"):
    """Fraction of the reference's tests that the completion's Python passes, inside a sandbox."""

    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """`none` runs model-written code with this user's rights: only where that is acceptable."""
    cpu_s: PositiveFloat = 5.0
    wall_s: PositiveFloat = 10.0
    memory_bytes: PositiveInt = 1 << 30
    output_bytes: PositiveInt = 1 << 20
    all_or_nothing: bool = False
    weight: float = 1.0
    name: str = ""


class ReasoningGymReward(_Variant, frozen=True, tag="reasoning_gym"):
    """The family's own scorer, strict: 1 at a score of `threshold` and above, else 0."""

    threshold: Fraction = 0.99
    extract: str = r"<answer>(.*?)</answer>"
    weight: float = 1.0
    name: str = ""


class OverlongPenalty(_Variant, frozen=True, tag="overlong"):
    """DAPO's soft punishment of long answers: 0 up to max_tokens - buffer_tokens, then down to -1 linearly, never below.

    Source: DAPO (arXiv 2503.14476), equation 13.
    """

    max_tokens: PositiveInt
    """Usually, and at most, generate.sampling.max_new_tokens."""
    buffer_tokens: PositiveInt
    weight: float = 1.0
    name: str = ""


class PreferenceReward(_Variant, frozen=True, tag="preference"):
    """1 for the chosen answer of a preferences task, 0 for the rejected one."""

    weight: float = 1.0
    name: str = ""


class PythonReward(_Variant, frozen=True, tag="python"):
    """A user's own function `module:function`, sync or async: (prompt, text) -> float; see reward/registry.py."""

    path: str
    weight: float = 1.0
    name: str = ""


RewardFunctionConfig = (
    AnswerMatchReward
    | FormatCheckReward
    | CodeExecReward
    | ReasoningGymReward
    | OverlongPenalty
    | PreferenceReward
    | PythonReward
)


class RewardConfig(_Stage, frozen=True):
    """Reward workers and what they compute: the weighted sum of `functions`."""

    num_workers: NonNegativeInt = 1
    functions: tuple[RewardFunctionConfig, ...] = (AnswerMatchReward(),)
    timeout_s: PositiveFloat = 30.0
    """One sample's rewards together; past it the sample is failed."""
    concurrency: PositiveInt = 2
    """Samples one worker scores at once, each in a process of its own."""
    process_memory_bytes: PositiveInt = 4 << 30
    """Data one scoring process may hold; a sample that needs more is failed and the process replaced."""


# -- inference -----------------------------------------------------------------------------------------------------------


class RewardModel(_Stage, frozen=True):
    """Any sequence-classification checkpoint with one output, read at the last token."""

    name: str
    """Of its part in the rewards."""
    path: str
    """Hugging Face folder, tokenizer of the policy."""
    weight: float = 1.0
    normalise: Literal["none", "running"] = "none"
    """`running`: minus the mean, over the deviation, of the scores seen so far by that worker; after `mean` and `std`."""
    mean: float = 0.0
    std: PositiveFloat = 1.0
    """Scores are (score - mean) / std."""
    clip: PositiveFloat | None = None
    """Then held in [-clip, clip]."""
    dtype: Literal["float32", "bfloat16"] = "float32"


class InferenceConfig(_Stage, frozen=True):
    """Workers that run reference and reward models forward only, beside generation; started where something needs them."""

    num_workers: PositiveInt = 1
    reward_models: tuple[RewardModel, ...] = ()
    tokens_per_batch: PositiveInt = 8192
    """Tokens of one packed forward pass."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the reference."""
    num_threads: PositiveInt = 1


# -- buffer --------------------------------------------------------------------------------------------------------------


class BufferConfig(_Stage, frozen=True):
    """The bounded, staleness-tracked experience buffer."""

    max_staleness: NonNegativeInt = 2
    """Eta: no token older than this many versions is ever trained. 0 is synchronous, exactly."""
    policy: Literal["wait", "drop", "mask"] = "wait"
    """What happens to a group about to pass eta: wait for it, drop it, or train it with its old tokens masked."""
    reissue_dropped: bool = True
    """Give a dropped or failed group's prompt to the generators again, as a new group."""
    max_group_retries: NonNegativeInt = 3
    """How often a group may be handed out again after its generator died."""
    max_running_groups: NonNegativeInt = 0
    """Most groups issued and not yet ready; 0: as the generators' slots allow."""
    min_group_members: PositiveInt = 2
    """Scored members a group needs to be trained when others failed; at most the group size."""
    ledger: Literal["disk", "memory"] = "disk"
    """`memory` is for benchmarks: nothing survives the process."""


# -- packing, broadcast, transport ---------------------------------------------------------------------------------------


class PackingConfig(_Stage, frozen=True):
    """How samples share micro-batches."""

    tokens_per_row: PositiveInt = 4096
    """Token budget of one micro-batch; a longer single sample is an error before it is generated."""


class SharedMemoryMedium(_Variant, frozen=True, tag="shared_memory"):
    """Double-buffered, one copy out, one copy in; same machine."""


class FilesMedium(_Variant, frozen=True, tag="files"):
    """Safetensors in a folder; any shared storage."""

    folder: str = ""
    """Empty: `weights/` in the run folder."""
    keep_last: PositiveInt = 2
    shard_bytes: PositiveInt = 1 << 30
    """Most bytes of one safetensors file, a larger tensor apart; shards are written and read side by side."""
    num_threads: PositiveInt = 4
    """Shards that are written or read at once."""


class ZeroMQMedium(_Variant, frozen=True, tag="zeromq"):
    """Chunks from the learner over TCP; any number of machines."""

    bind: str = "tcp://127.0.0.1:*"
    chunk_bytes: PositiveInt = 1 << 20
    fanout: NonNegativeInt = 2
    """Generators the learner feeds itself; each feeds as many others with what it has already. 0: the learner feeds all."""
    relay_bind: str = "tcp://127.0.0.1:*"
    """Where a generator listens for those it feeds."""


class GlooMedium(_Variant, frozen=True, tag="gloo"):
    """Broadcast by torch.distributed over TCP, buckets at a time: one sender, all subscribers at once."""

    host: str = "127.0.0.1"
    """Where the learner lets the others meet; they must reach it."""
    timeout_s: PositiveFloat = 30.0
    """A member that does not take part for this long is dropped, and the rest go on."""
    gather_s: PositiveFloat = 1.0
    """How long a version waits for members to be ready before it goes out to those that are."""


class NCCLMedium(_Variant, frozen=True, tag="nccl"):
    """Broadcast from GPU to GPU, buckets at a time; members as in `gloo`."""

    host: str = "127.0.0.1"
    timeout_s: PositiveFloat = 30.0
    gather_s: PositiveFloat = 1.0


class CUDAIPCMedium(_Variant, frozen=True, tag="cuda_ipc"):
    """Learner and engine on the same GPU: the engine opens the learner's own tensors; handles travel, bytes do not."""


class SharedStorageMedium(_Variant, frozen=True, tag="shared_storage"):
    """Nothing travels: the engine reads the learner's own parameters where they lie. For `placement.kind = "hybrid"` alone."""


class AutoMedium(_Variant, frozen=True, tag="auto"):
    """Chosen when the run starts, from where its processes are; the log says what and why."""


MediumConfig = (
    SharedMemoryMedium | FilesMedium | ZeroMQMedium | GlooMedium | NCCLMedium | CUDAIPCMedium | SharedStorageMedium | AutoMedium
)


class DeltaConfig(_Stage, frozen=True):
    """Send only what changed in the bytes sent: values, not differences; lossless. Worth it with `dtype = "bfloat16"`."""

    full_every: PositiveInt = 20
    """Every n-th version is also made fetchable whole, where the medium does not hold the newest one whole anyway."""
    compression_level: Annotated[int, Meta(ge=1, le=19)] = 1
    """Of zstd; more costs time and, on the bytes of deltas, makes them no smaller."""
    max_share: Fraction = 0.5
    """A delta larger than this share of the whole is not sent; the whole is."""


class BroadcastConfig(_Stage, frozen=True):
    """How new weights reach the generators."""

    medium: MediumConfig = SharedMemoryMedium()
    dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Of the bytes sent; `model`: as the learner holds them."""
    bucket_bytes: PositiveInt = 16 << 20
    """What is fingerprinted, gathered and applied at once."""
    delta: DeltaConfig | None = None
    """None: every version travels whole."""
    probe_tolerance: NonNegativeFloat = 0.05
    """Probe logprobs further apart than this, generator against learner, are an alarm."""


class TransportConfig(_Stage, frozen=True):
    """The data and control channels."""

    kind: Literal["ipc", "tcp"] = "ipc"
    host: str = "127.0.0.1"
    """Only with `tcp`; anything but loopback opens the run to the network (CURVE keys still apply)."""
    encryption: Literal["curve", "plain"] = "curve"
    window: PositiveInt = 256
    """Most messages sent and not yet acknowledged, per connection and direction."""
    max_message_bytes: PositiveInt = 256 << 20
