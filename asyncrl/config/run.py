"""The whole of what a run is told, with tasks, stages without variants, where processes come from, life and observation."""

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
"""In place of a host: the address by which other machines reach the one that a process runs on."""


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


class ElasticConfig(_Stage, frozen=True):
    """Generators come and go between two bounds, by how much the learner waits and how full the engines are."""

    min_generators: Processes = 1
    max_generators: Processes = 4
    decide_every_s: PositiveFloat = 15.0
    """What was measured is averaged over so long."""
    patience: PositiveInt = 2
    """So many verdicts in a row must agree before the number changes."""
    learner_idle_above: Fraction = 0.1
    """A learner that waits for samples for more than this share of the time wants more generators."""
    slots_used_below: Fraction = 0.6
    """Engines that use less of their slots than this, while the learner is busy, are too many."""


class ProcessNeeds(_Stage, frozen=True):
    """What one process asks of the node it is placed on."""

    num_cpus: NonNegativeFloat = 0.25
    """Ray counts places, it limits nobody: by default four processes go on a core."""
    num_gpus: NonNegativeFloat | None = None
    """None: as many as its devices say, learner.ranks on `cuda`, say."""
    memory_gib: NonNegativeFloat = 0.0
    """Host memory that Ray reserves; 0: none is."""
    resources: dict[str, NonNegativeFloat] = {}
    """Of the cluster's own names, `{ accelerator_type:H100 = 0.001 }`."""
    labels: dict[str, str] = {}
    """Which nodes will do: `{ "asyncrl/role" = "rewards" }`, or Ray's `in(a,b)` and `!a`, against `ray start --labels`."""


class RayEnvironment(_Stage, frozen=True):
    """What Ray makes on every node before a process starts there; left out, what `ray job submit` was given."""

    working_dir: str = ""
    pip: tuple[str, ...] = ()
    env_vars: dict[str, str] = {}


class LocalLaunch(_Variant, frozen=True, tag="local"):
    """Processes of this machine."""

    elastic: ElasticConfig | None = None
    """None: generate.num_workers generators, always."""


class RayLaunch(_Variant, frozen=True, tag="ray"):
    """One Ray actor for each process, in placement groups, on any number of nodes. Extra `ray`; see docs/scale.md."""

    address: str = "auto"
    """Of a running cluster: `auto` finds the one this machine is part of (RAY_ADDRESS, or `ray start`), else HOST:PORT."""
    strategy: Literal["PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """How the processes that a run begins with are laid over the nodes that will do."""
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
    """Any sequence-classification checkpoint with one output, read at the last token."""

    name: str
    """Of its part in the rewards."""
    path: str
    """Hugging Face folder, tokenizer of the policy."""
    weight: FiniteFloat = 1.0
    normalise: Literal["none", "running"] = "none"
    """`running`: minus the mean, over the deviation, of the scores seen so far by that worker; after `mean` and `std`."""
    mean: FiniteFloat = 0.0
    std: PositiveFloat = 1.0
    """Scores are (score - mean) / std."""
    clip: PositiveFloat | None = None
    """Then held in [-clip, clip]."""
    dtype: Literal["float32", "bfloat16"] = "float32"


class InferenceConfig(_Stage, frozen=True):
    """Workers that run reference and reward models forward only, beside generation; started where something needs them.

    On the learner's own device, where phases take turns, they have a phase of their own (docs/placement.md).
    """

    num_workers: Processes = 1
    reward_models: tuple[RewardModel, ...] = ()
    tokens_per_batch: PositiveInt = 8192
    """Tokens of one packed forward pass."""
    device: Device = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the reference."""
    num_threads: Processes = 1


class BufferConfig(_Stage, frozen=True):
    """The bounded, staleness-tracked experience buffer."""

    max_staleness: NonNegativeInt = 2
    """Eta: no token older than this many versions is ever trained. 0 is synchronous, exactly."""
    ahead: Literal["as_needed", "as_allowed"] = "as_needed"
    """How far generation runs ahead of the learner where eta is over 1: only as far as keeps the learner busy, so that data is as
    fresh as it can be; or as far as eta allows, as always where generators and learner take turns or the learner is not ours."""
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


class PackingConfig(_Stage, frozen=True):
    """How samples share micro-batches."""

    tokens_per_row: PositiveInt = 4096
    """Token budget of one micro-batch, a prompt counted once for its group; a longer sample is an error before it is made."""


class TransportConfig(_Stage, frozen=True):
    """The data and control channels."""

    kind: Literal["ipc", "tcp"] = "ipc"
    host: str = "127.0.0.1"
    """Only with `tcp`; anything but loopback opens the run to the network (CURVE keys still apply)."""
    encryption: Literal["curve", "plain"] = "curve"
    """`curve`: by the run's keys, over tcp. The socket of `ipc` lies in a folder that only its user can enter, who could read the
    keys as well: nothing is encrypted there."""
    window: BoundedInt = 256
    """Most messages sent and not yet acknowledged, per connection and direction."""
    max_message_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 256 << 20


class EvalConfig(_Stage, frozen=True):
    """Sampled accuracy and reward on held-out prompts."""

    at_start: bool = True
    at_end: bool = True
    every_steps: NonNegativeInt = 0
    """0: only at start and end. An evaluation in between runs beside training and does not stop it."""
    num_prompts: PositiveInt = 256
    samples_per_prompt: BoundedInt = 1
    temperature: NonNegativeFloat | None = None
    """None: as in training."""


class PlacementConfig(_Stage, frozen=True):
    """Who is on which device, and when. See docs/placement.md."""

    kind: Literal["disaggregated", "colocated", "hybrid", "async_hybrid"] = "disaggregated"
    """disaggregated: devices of their own. colocated: the same device, phases take turns. hybrid: the same device and the same
    weights. async_hybrid: beside each other on the same device, and more generators that come and go."""
    device_memory_gib: NonNegativeFloat = 0.0
    """Of the shared device, for this run; 0: all a GPU has, no limit on a CPU (where a number is a simulated budget)."""
    offload_to: Literal["host", "disk"] = "host"
    """Where a component goes that a phase does not need."""
    host_memory_gib: NonNegativeFloat = 0.0
    """Of host memory, what offloaded components of one process may take; what finds it full goes to disk. 0: no limit."""
    generation_share: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """async_hybrid: of the shared device's memory and time that generation may take."""
    most_joining_generators: ProcessesOrNone = 0
    """Generators that may join while the run goes on, at once (`asyncrl join`); not where phases take turns."""

    @property
    def takes_turns(self) -> bool:
        """Return whether rollout and training exclude each other."""
        return self.kind in {"colocated", "hybrid"}


class CheckpointConfig(_Stage, frozen=True):
    """When the run can be picked up again from."""

    every_steps: NonNegativeInt = 50
    """0: only at the end and on request."""
    keep_last: PositiveInt = 2


class SupervisionConfig(_Stage, frozen=True):
    """How deaths and stalls are met."""

    heartbeat_s: PositiveFloat = 1.0
    heartbeat_timeout_s: PositiveFloat = 60.0
    """A process silent for this long is taken for dead, killed and restarted."""
    start_timeout_s: PositiveFloat = 300.0
    max_deaths: NonNegativeInt = 5
    """More deaths than this within `death_window_s` end the run, with the reason."""
    death_window_s: PositiveFloat = 300.0
    backoff_s: PositiveFloat = 0.5
    """Before the first restart; doubles with each further death in the window, up to 30 s."""
    stall_timeout_s: PositiveFloat = 600.0
    """Nothing generated, scored or trained for this long: say who waits for whom, and exit non-zero."""
    drain_timeout_s: PositiveFloat = 120.0
    max_failed_share: Fraction = 0.5
    """A run ends, with the reason, once a larger share than this of 64 groups in a row has failed."""


class OwnerConfig(_Stage, frozen=True):
    """What becomes of a detached run that nobody is attached to (docs/running.md)."""

    absent: Literal["go_on", "drain", "stop"] = "go_on"
    grace_s: NonNegativeFloat = 10.0
    """For somebody to attach again."""


AlarmRule = Literal[
    "weights.mismatch", "weights.lag", "weights.wrong", "weights.blocked", "gradient.spike", "learning_rate.high",
    "off_policy.ess", "off_policy.lost", "off_policy.ratio", "off_policy.drift", "kl.reference", "reward.equal", "reward.dead",
    "reward.collapse", "reward.hollow", "entropy.collapse", "entropy.grows", "length.truncated", "length.grows", "groups.lost",
    "bias", "generation.slow", "generation.starved", "generation.uneven", "score.slow", "stall.early", "disk.full",
    "memory.full", "memory.device",
]  # fmt: skip


class ObserveConfig(_Stage, frozen=True):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = False
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "asyncrl"
    trace: bool = False
    """Write trace.json (Chrome / Perfetto) at the end."""
    pictures: bool = True
    """Draw reward.png and timeline.png at the end; `asyncrl report` draws them at any time."""
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    alarms: dict[AlarmRule, Literal["off", "warn", "pause", "stop"]] = {}
    """By rule (docs/observability.md): whether its alarm is looked for, and what is done besides telling it. Left out: `warn`."""
    record: Literal["off", "decisions", "batches", "all"] = "off"
    """Keep in RUN/record what `asyncrl replay` needs. `decisions`: every event that the controller decided by; `batches`: also
    every step's batch; `all`: also the samples that no step trained."""
    webhook: Annotated[str, Meta(pattern=r"^(https?://[^\s/?#]+\S*)?$")] = ""
    """URL to which every alarm is posted as JSON, as it is raised and as it is over; empty: none."""
    samples: NonNegativeInt = 32
    """Samples of each step that are kept, with rewards and versions: as text (samples.jsonl, wandb, TensorBoard), and token by
    token as the learner saw them (tokens.jsonl); 0: none."""

    @property
    def records_batches(self) -> bool:
        """Return whether every step's batch is kept in RUN/record."""
        return self.record in {"batches", "all"}


class RunConfig(_Stage, frozen=True):
    """A run, whole. Decoded from TOML by config/load.py; the resolved form lies in the run folder."""

    name: str = "run"
    folder: str = "runs"
    """The run lives in `folder/name`."""
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
        """Return whether the reference runs on inference workers: something reads it, and reference.where says so."""
        return self.algorithm.needs_reference and self.algorithm.reference.where == "worker"

    @property
    def trusts_code(self) -> bool:
        """Return whether Python in the pretrained model's folder may be run."""
        return isinstance(self.model, PretrainedModel) and self.model.trust_remote_code

    @property
    def needs_inference(self) -> bool:
        """Return whether inference workers are started: a reward model is named, or the reference runs there."""
        return self.has_reference_worker or bool(self.inference.reward_models)

    @property
    def has_rules(self) -> bool:
        """Return whether reward workers score: there are reward functions, or nothing else scores."""
        return bool(self.reward.functions) or not self.inference.reward_models

    @property
    def probe_tolerance(self) -> float:
        """Return how far apart an engine's and the learner's log-probabilities of a probe may be, in nats."""
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
        """Most groups issued and not yet trained: (max_staleness + 1) x groups_per_step."""
        return (self.buffer.max_staleness + 1) * self.algorithm.groups_per_step

    @property
    def most_samples_in_flight(self) -> int:
        """Most samples issued and not yet trained: most_groups_ahead x members_per_group."""
        return self.most_groups_ahead * self.algorithm.members_per_group
