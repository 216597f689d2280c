"""Messages in which processes report about themselves, and orders from the controller to them."""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL = 4
"""Protocol number, raised whenever a peer with the previous number could misread a message; checked at hello."""

Phase = Literal["rollout", "inference", "train"]
"""What a shared device is used for; only placements that take turns have phases."""
Residence = Literal["absent", "disk", "host", "device"]
"""Where a component is; `absent`: it must be made again."""

ProcessKind = Literal["controller", "generator", "reward", "inference", "learner", "client"]


class Message(msgspec.Struct, frozen=True):
    """Base class of everything that is sent over a channel; each subclass has its own tag."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a connecting process."""

    protocol: int
    kind: ProcessKind
    name: str
    """Unique within the run and stable over restarts, `generator-0`."""
    incarnation: str
    """Unique to this start of the process; another one under the same name replaces it."""
    pid: int


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Any process to the controller, every `supervision.heartbeat_s`: it is alive, and what it is doing."""

    name: str
    sent_s: float
    waiting_for: str = ""
    """Empty while it works; else what it waits for, as text: `weights of version 3`, `a batch`."""
    waiting_since_s: float = 0.0
    gauges: dict[str, float] = {}
    """Named as in observe/metrics.py: tokens generated so far, running requests, idle seconds, resident bytes."""


class LearnerReady(Message, frozen=True, tag="learner_ready"):
    """Learner to controller: the model is loaded or resumed at `version`, and the model's folder can be opened."""

    version: int
    model_folder: str
    """Config and tokenizer (and first weights) in Hugging Face layout, for the generators."""
    metrics: dict[str, float] = {}
    """Metrics of the warm start, if there was one."""
    checkpoint: str = ""
    """Folder of the checkpoint it was loaded from; empty: the run's initial model."""


class LoadModel(Message, frozen=True, tag="load_model"):
    """Controller to generator or inference worker: open this folder (or what the config names beside it) and get ready."""

    model_folder: str


class JoinTerms(Message, frozen=True, tag="join_terms"):
    """Controller to a joined generator, as the first message: the run's config, and where the run is."""

    config_toml: str
    """The resolved config; a generator that joins may differ in its engine's own settings only."""
    run_folder: str
    """The run's folder on the run's machine."""
    machine: str
    """Host name of the run's machine; on another machine, media that work on one machine only are refused."""


class EngineReady(Message, frozen=True, tag="engine_ready"):
    """Generator to controller: the engine is ready and can run this many requests at once."""

    generator: str
    num_slots: int
    version: int
    """Version of the weights it holds, -1 when none yet."""


class EngineRoom(Message, frozen=True, tag="engine_room"):
    """Generator to controller: the engine can now run this many requests at once, which changes with its free memory."""

    generator: str
    num_slots: int


class ModelsReady(Message, frozen=True, tag="models_ready"):
    """Inference worker to controller: its models are in memory and it can score samples."""

    worker: str
    models: tuple[str, ...]
    num_bytes: int
    """Size of the models' weights."""


class Pause(Message, frozen=True, tag="pause"):
    """Stop generating; requests in flight stay where they are."""


class Resume(Message, frozen=True, tag="resume"):
    """Continue after Pause."""


class ComponentMove(msgspec.Struct, frozen=True):
    """A component that was moved, or will be moved."""

    component: str
    """`policy`, `policy optimizer`, `critic`, `reference`, `reward NAME`, `engine weights`, `KV cache`."""
    before: Residence
    after: Residence
    num_bytes: int
    seconds: float = 0.0


class SetPhase(Message, frozen=True, tag="set_phase"):
    """Controller to a process on a shared device: load the components that this phase needs, and release the others."""

    phase: Phase
    number: int
    """Grows with every phase switch; the answer has the same number."""


class PhaseReached(Message, frozen=True, tag="phase_reached"):
    """Answer to SetPhase: the moves that were made, and what the process now holds on the device."""

    name: str
    phase: Phase
    number: int
    moves: tuple[ComponentMove, ...] = ()
    resident: dict[str, int] = {}
    """Component to bytes on the device."""
    peak_bytes: int = 0
    """Peak memory on the device during the phase that ended."""
    finished_s: float = 0.0
    """Clock seconds."""


class Shutdown(Message, frozen=True, tag="shutdown"):
    """Finish what must be finished, close, and exit with 0."""

    reason: str = ""


class AbortGroup(Message, frozen=True, tag="abort_group"):
    """Controller to generator: stop generating this group, which was dropped; its members come back as failures."""

    group_id: int


class Checkpoint(Message, frozen=True, tag="checkpoint"):
    """Controller to learner: write a checkpoint once this version is reached."""

    version: int


class CheckpointDone(Message, frozen=True, tag="checkpoint_done"):
    """Learner to controller: the checkpoint is complete and on disk."""

    version: int
    folder: str
    seconds: float


class Fault(Message, frozen=True, tag="fault"):
    """Any process to the controller: it cannot continue; `fatal` says that a restart would not help."""

    name: str
    reason: str
    fatal: bool
    """True if a restart would fail in the same way (non-finite loss, wrong config)."""
