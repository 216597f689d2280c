"""The whole config of a run: tasks, stages without variants, launching, placement, supervision and observation."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config import (
    BoundedInt,
    Device,
    FiniteFloat,
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
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.config.generate import GenerateConfig
from asyncrl.config.learner import LearnerConfig, ModelConfig, PretrainedModel, ScratchModel
from asyncrl.config.reward import RewardConfig

NODE = "node"
"""Used as a host: the address at which other machines reach a process's machine."""


class AdditionTask(_Variant, frozen=True, tag="addition"):
    """`12+34=` -> `46`, all pairs of numbers of `digits` digits, split by seed; the smallest task that shows learning."""

    digits: Annotated[int, Meta(ge=1, le=4)] = 2
    held_out: PositiveInt = 512
    """Pairs that are never trained on, not even in the warm start."""


class ReasoningGymTask(_Variant, frozen=True, tag="reasoning_gym"):
    """A reasoning-gym family: strict scoring (0.99 and above is right), duplicates removed, a held-out split."""

    family: str = "chain_sum"
    family_options: dict[str, int | float | str | bool | list[int | float | str]] = {}
    size: PositiveInt = 2000
    """Problems generated before duplicates are removed."""
    held_out: PositiveInt = 200
    shots: NonNegativeInt = 3
    """Worked examples, shown as chat turns before the problem; they are in neither split."""
    system_prompt: str = ""


class JsonlTask(_Variant, frozen=True, tag="jsonl"):
    """A file of prompts and answers, one JSON object per line."""

    path: str
    prompt_field: str = "question"
    answer_field: str = "answer"
    answer_regex: str = ""
    """If given, its first group, matched in the answer field, is the reference answer (GSM8K: `#### (.+)`)."""
    held_out_path: str = ""
    """File of held-out prompts; empty: `held_out` lines are taken from `path`, chosen by the seed."""
    held_out: NonNegativeInt = 200
    shots: NonNegativeInt = 0
    system_prompt: str = ""
    chat: bool = True
    """False: the prompt field is the text itself."""


class PreferencesTask(_Variant, frozen=True, tag="preferences"):
    """A file of preferences, one JSON object per line: prompt, chosen answer and rejected answer. Trained offline with DPO."""

    path: str
    prompt_field: str = "prompt"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    held_out: NonNegativeInt = 0
    system_prompt: str = ""
    chat: bool = True
    """False: the prompt field is the text itself."""


class PythonTask(_Variant, frozen=True, tag="python"):
    """A user's own task: a `module:function` that is called with the run's seed and returns a `TaskData`."""

    path: str


TaskConfig = AdditionTask | ReasoningGymTask | JsonlTask | PreferencesTask | PythonTask


class ElasticConfig(_Stage, frozen=True):
    """Changes the number of generators between two bounds, by how much the learner waits and how full the engines are."""

    min_generators: Processes = 1
    max_generators: Processes = 4
    decide_every_s: PositiveFloat = 15.0
    """Time between decisions; measurements are averaged over it."""
    patience: PositiveInt = 2
    """How many decisions in a row must agree before the number of generators changes."""
    learner_idle_above: Fraction = 0.1
    """Add generators if the learner waits for samples for more than this share of the time."""
    slots_used_below: Fraction = 0.6
    """Remove generators if engines use less than this share of their slots while the learner is busy."""


class ProcessNeeds(_Stage, frozen=True):
    """Resources that one process needs on its node."""

    num_cpus: NonNegativeFloat = 0.25
    """Ray uses this for scheduling only and does not limit a process: by default four processes share a core."""
    num_gpus: NonNegativeFloat | None = None
    """None: as many as the process's devices need, for example learner.ranks on `cuda`."""
    memory_gib: NonNegativeFloat = 0.0
    """Host memory that Ray reserves; 0: none."""
    resources: dict[str, NonNegativeFloat] = {}
    """Custom resources of the cluster, such as `{ accelerator_type:H100 = 0.001 }`."""
    labels: dict[str, str] = {}
    """Labels that a node must have (`ray start --labels`): `{ "asyncrl/role" = "rewards" }`, or Ray's `in(a,b)` and `!a`."""


class RayEnvironment(_Stage, frozen=True):
    """Environment that Ray makes on every node before a process starts there; not set: that of `ray job submit`."""

    working_dir: str = ""
    pip: tuple[str, ...] = ()
    env_vars: dict[str, str] = {}


class LocalLaunch(_Variant, frozen=True, tag="local"):
    """Start all processes on this machine."""

    elastic: ElasticConfig | None = None
    """None: generate.num_workers generators, always."""


class RayLaunch(_Variant, frozen=True, tag="ray"):
    """One Ray actor for each process, in placement groups, on any number of nodes. Needs the extra `ray`; see docs/scale.md."""

    address: str = "auto"
    """Address of a running cluster: HOST:PORT, or `auto` for the cluster of this machine (RAY_ADDRESS, or `ray start`)."""
    strategy: Literal["PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """How the run's initial processes are distributed over suitable nodes."""
    learner: ProcessNeeds = ProcessNeeds()
    generator: ProcessNeeds = ProcessNeeds()
    reward: ProcessNeeds = ProcessNeeds()
    inference: ProcessNeeds = ProcessNeeds()
    environment: RayEnvironment = RayEnvironment()
    elastic: ElasticConfig | None = None
    """None: generate.num_workers generators, always."""


LaunchConfig = LocalLaunch | RayLaunch


def has_own_environment(launch: LaunchConfig) -> bool:
    """Return whether the run's processes see other folders and packages than the process that starts it."""
    return isinstance(launch, RayLaunch) and launch.environment != RayEnvironment()


class RewardModel(_Stage, frozen=True):
    """A sequence-classification checkpoint with one output, which is read at the last token."""

    name: str
    """Name of this model's part of the reward."""
    path: str
    """Hugging Face folder; it must have the policy's tokenizer."""
    weight: FiniteFloat = 1.0
    normalise: Literal["none", "running"] = "none"
    """`running`: after `mean` and `std`, also normalise by the mean and deviation of the worker's scores so far."""
    mean: FiniteFloat = 0.0
    std: PositiveFloat = 1.0
    """Scores are (score - mean) / std."""
    clip: PositiveFloat | None = None
    """After normalisation, scores are clipped to [-clip, clip]; None: no clipping."""
    dtype: Literal["float32", "bfloat16"] = "float32"


class InferenceConfig(_Stage, frozen=True):
    """Workers that run the forward passes of reference and reward models during generation; started only if needed.

    On the learner's device, if phases take turns, they have their own phase (docs/placement.md).
    """

    num_workers: Processes = 1
    reward_models: tuple[RewardModel, ...] = ()
    tokens_per_batch: PositiveInt = 8192
    """Tokens of one packed forward pass."""
    device: Device = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the reference."""
    num_threads: Processes = 1


class BufferConfig(_Stage, frozen=True):
    """The bounded, staleness-tracked experience buffer."""

    max_staleness: NonNegativeInt = 2
    """Eta: no token more than this many versions old is ever trained. 0: fully synchronous."""
    ahead: Literal["as_needed", "as_allowed"] = "as_needed"
    """How far generation runs ahead of the learner if eta is over 1: only as far as needed to keep the learner busy, so that data
    is fresh; or as far as eta allows (always so if generators and learner take turns, or with an outside learner)."""
    policy: Literal["wait", "drop", "mask"] = "wait"
    """What happens to a group that is about to exceed eta: wait for it, drop it, or train it with its old tokens masked."""
    reissue_dropped: bool = True
    """Give a dropped or failed group's prompt to the generators again, as a new group."""
    max_group_retries: NonNegativeInt = 3
    """How often a group may be handed out again after its generator died."""
    max_running_groups: NonNegativeInt = 0
    """Maximum number of groups issued and not yet ready; 0: limited only by the generators' slots."""
    min_group_members: PositiveInt = 2
    """Number of scored members that a group needs to be trained if other members failed; at most the group size."""
    ledger: Literal["disk", "memory"] = "disk"
    """`memory` is for benchmarks: nothing survives the process."""


class PackingConfig(_Stage, frozen=True):
    """How samples share micro-batches."""

    tokens_per_row: PositiveInt = 4096
    """Token budget of one micro-batch; a group's prompt counts once. The config must not allow longer samples."""


class TransportConfig(_Stage, frozen=True):
    """The data and control channels."""

    kind: Literal["ipc", "tcp"] = "ipc"
    host: str = "127.0.0.1"
    """Only with `tcp`; any address except loopback opens the run to the network (CURVE keys still apply)."""
    encryption: Literal["curve", "plain"] = "curve"
    """`curve`: tcp is encrypted with the run's keys. `ipc` is never encrypted: its socket is in a folder that only its user can
    enter, and this user could read the keys as well."""
    window: BoundedInt = 256
    """Maximum number of messages sent and not yet acknowledged, per connection and direction."""
    max_message_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 256 << 20


class EvalConfig(_Stage, frozen=True):
    """Sampled accuracy and reward on held-out prompts."""

    at_start: bool = True
    at_end: bool = True
    every_steps: NonNegativeInt = 0
    """0: only at start and end. Other evaluations run during training and do not stop it: later versions
    take part; only the first and the last evaluation are of one version."""
    num_prompts: PositiveInt = 256
    samples_per_prompt: BoundedInt = 1
    temperature: NonNegativeFloat | None = None
    """None: as in training."""


class PlacementConfig(_Stage, frozen=True):
    """Which processes use which device, and when. See docs/placement.md."""

    kind: Literal["disaggregated", "colocated", "hybrid", "async_hybrid"] = "disaggregated"
    """disaggregated: separate devices. colocated: the same device, phases take turns. hybrid: the same device and the same
    weights. async_hybrid: both run on the same device at the same time, and more generators may join and leave."""
    device_memory_gib: NonNegativeFloat = 0.0
    """Memory of the shared device for this run; 0: all of a GPU, no limit on a CPU (where a number is a simulated limit)."""
    offload_to: Literal["host", "disk"] = "host"
    """Where components are moved that a phase does not need."""
    host_memory_gib: NonNegativeFloat = 0.0
    """Host memory for offloaded components of one process; when it is full, components go to disk. 0: no limit."""
    generation_share: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """async_hybrid: share of the shared device's memory and time for generation."""
    most_joining_generators: ProcessesOrNone = 0
    """Maximum number of joined generators at once (`asyncrl join`); not possible if phases take turns."""

    @property
    def takes_turns(self) -> bool:
        """Return whether rollout and training exclude each other."""
        return self.kind in {"colocated", "hybrid"}


class CheckpointConfig(_Stage, frozen=True):
    """When checkpoints are written."""

    every_steps: NonNegativeInt = 50
    """0: only at the end and on request."""
    keep_last: PositiveInt = 2


class SupervisionConfig(_Stage, frozen=True):
    """How deaths of processes and stalls are handled."""

    heartbeat_s: PositiveFloat = 1.0
    heartbeat_timeout_s: PositiveFloat = 60.0
    """A process that sends nothing for this long counts as dead: it is killed and restarted."""
    start_timeout_s: PositiveFloat = 300.0
    max_deaths: NonNegativeInt = 5
    """More deaths than this within `death_window_s` end the run, with the reason."""
    death_window_s: PositiveFloat = 300.0
    backoff_s: PositiveFloat = 0.5
    """Wait before the first restart; it doubles with each further death in the window, up to 30 s."""
    stall_timeout_s: PositiveFloat = 600.0
    """If nothing is generated, scored or trained for this long, the run says which process waits for what, and exits non-zero."""
    drain_timeout_s: PositiveFloat = 120.0
    max_failed_share: Fraction = 0.5
    """The run ends, with the reason, if more than this share of 64 groups in a row has failed."""


class OwnerConfig(_Stage, frozen=True):
    """What happens to a detached run when no program is attached to it (docs/running.md)."""

    absent: Literal["go_on", "drain", "stop"] = "go_on"
    grace_s: NonNegativeFloat = 10.0
    """How long the run waits for a program to attach again."""


AlarmRule = Literal[
    "weights.mismatch", "weights.lag", "weights.wrong", "weights.blocked", "gradient.spike",
    "gradient.overflow", "learning_rate.high",
    "off_policy.ess", "off_policy.lost", "off_policy.dropped", "off_policy.ratio", "off_policy.drift", "kl.reference",
    "reward.equal", "reward.dead", "reward.collapse", "reward.hollow", "entropy.collapse", "entropy.grows",
    "length.truncated", "length.grows", "groups.lost", "bias", "generation.slow", "generation.starved", "generation.uneven",
    "score.slow", "stall.early", "disk.full", "memory.full", "memory.device",
]  # fmt: skip


class ObserveConfig(_Stage, frozen=True):
    """Metrics beside metrics.jsonl, alarms, and what is recorded."""

    tensorboard: bool = False
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "asyncrl"
    trace: bool = False
    """Write trace.json (Chrome / Perfetto) at the end."""
    pictures: bool = True
    """Draw reward.png and timeline.png at the end; `asyncrl report` draws them at any time."""
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    alarms: dict[AlarmRule, Literal["off", "warn", "pause", "stop"]] = {}
    """Action for each alarm rule (docs/observability.md): off, warn, or also pause the run or drain it (stop). Unset: warn."""
    record: Literal["off", "decisions", "batches", "all"] = "off"
    """Keep in RUN/record what `asyncrl replay` needs. `decisions`: every event on which the controller's decisions depend;
    `batches`: also every step's batch; `all`: also the samples that no step trained."""
    webhook: Annotated[str, Meta(pattern=r"^(https?://[^\s/?#]+\S*)?$")] = ""
    """URL to which every alarm is posted as JSON, when it is raised and when it is over; empty: none."""
    samples: NonNegativeInt = 32
    """Number of samples of each step to keep, with rewards and versions: as text (samples.jsonl, wandb, TensorBoard), and token
    by token with the learner's figures (tokens.jsonl); 0: none."""

    @property
    def records_batches(self) -> bool:
        """Return whether every step's batch is kept in RUN/record."""
        return self.record in {"batches", "all"}


class RunConfig(_Stage, frozen=True):
    """The config of a run. config/load.py decodes it from TOML; the resolved config is in the run folder."""

    name: str = "run"
    folder: str = "runs"
    """The run's folder is `folder/name`."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    num_steps: PositiveInt = 100
    """Optimizer steps; the run ends with this version."""
    task: TaskConfig = AdditionTask()
    model: ModelConfig = ScratchModel()
    generate: GenerateConfig = GenerateConfig()
    reward: RewardConfig = RewardConfig()
    inference: InferenceConfig = InferenceConfig()
    buffer: BufferConfig = BufferConfig()
    packing: PackingConfig = PackingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    broadcast: BroadcastConfig = BroadcastConfig()
    placement: PlacementConfig = PlacementConfig()
    transport: TransportConfig = TransportConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    observe: ObserveConfig = ObserveConfig()
    launch: LaunchConfig = LocalLaunch()
    owner: OwnerConfig = OwnerConfig()
    max_run_s: NonNegativeFloat = 0.0
    """Drain and checkpoint after this long; 0: no limit."""

    @property
    def has_reference_worker(self) -> bool:
        """Return whether the reference runs on inference workers: it is needed, and reference.where is `worker`."""
        return self.algorithm.needs_reference and self.algorithm.reference.where == "worker"

    @property
    def trusts_code(self) -> bool:
        """Return whether Python in the pretrained model's folder may be run."""
        return isinstance(self.model, PretrainedModel) and self.model.trust_remote_code

    @property
    def needs_inference(self) -> bool:
        """Return whether inference workers are started: there is a reward model, or the reference runs on them."""
        return self.has_reference_worker or bool(self.inference.reward_models)

    @property
    def has_rules(self) -> bool:
        """Return whether reward workers score: there are reward functions, or no reward model."""
        return bool(self.reward.functions) or not self.inference.reward_models

    @property
    def probe_tolerance(self) -> float:
        """Return how much an engine's and the learner's log-probabilities of a probe may differ, in nats."""
        if self.broadcast.probe_tolerance is not None:
            return self.broadcast.probe_tolerance
        formats = {self.learner.dtype, getattr(self.generate.engine, "dtype", "float32")}
        return 0.05 if formats == {"float32"} else 1.0

    @property
    def samples_per_step(self) -> int:
        """Samples one optimizer step consumes: groups_per_step x members_per_group."""
        return self.algorithm.groups_per_step * self.algorithm.members_per_group

    @property
    def most_groups_ahead(self) -> int:
        """Maximum number of groups issued and not yet trained: (max_staleness + 1) x groups_per_step."""
        return (self.buffer.max_staleness + 1) * self.algorithm.groups_per_step

    @property
    def most_samples_in_flight(self) -> int:
        """Maximum number of samples issued and not yet trained: most_groups_ahead x members_per_group."""
        return self.most_groups_ahead * self.algorithm.members_per_group
