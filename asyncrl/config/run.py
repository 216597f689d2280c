"""The whole of what a run is told, and what follows from it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.algorithm import AlgorithmConfig, LearnerConfig
from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.config.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, _Stage
from asyncrl.config.generate import GenerateConfig
from asyncrl.config.launch import LaunchConfig, LocalLaunch
from asyncrl.config.model import ModelConfig, ScratchModel
from asyncrl.config.reward import RewardConfig
from asyncrl.config.stages import BufferConfig, InferenceConfig, PackingConfig, TransportConfig
from asyncrl.config.tasks import AdditionTask, TaskConfig


class EvalConfig(_Stage, frozen=True):
    """Sampled accuracy and reward on held-out prompts."""

    at_start: bool = True
    at_end: bool = True
    every_steps: NonNegativeInt = 0
    """0: only at start and end. An evaluation in between runs beside training and does not stop it."""
    num_prompts: PositiveInt = 256
    samples_per_prompt: PositiveInt = 1
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
    most_joining_generators: NonNegativeInt = 0
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


class ObserveConfig(_Stage, frozen=True):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = False
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "asyncrl"
    trace: bool = False
    """Write trace.json (Chrome / Perfetto) at the end."""
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"


class RunConfig(_Stage, frozen=True):
    """A run, whole. Decoded from TOML by config/load.py; the resolved form lies in the run folder."""

    name: str = "run"
    folder: str = "runs"
    """The run lives in `folder/name`."""
    seed: NonNegativeInt = 0
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
    max_run_s: Annotated[float, Meta(ge=0)] = 0.0
    """Drain and checkpoint after this long; 0: no limit."""

    @property
    def has_reference_worker(self) -> bool:
        """Return whether the reference runs on inference workers: something reads it, and reference.where says so."""
        return self.algorithm.needs_reference and self.algorithm.reference.where == "worker"

    @property
    def needs_inference(self) -> bool:
        """Return whether inference workers are started: a reward model is named, or the reference runs there."""
        return self.has_reference_worker or bool(self.inference.reward_models)

    @property
    def has_rules(self) -> bool:
        """Return whether reward workers score: there are reward functions, or nothing else scores."""
        return bool(self.reward.functions) or not self.inference.reward_models

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
