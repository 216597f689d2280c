"""What processes tell each other about themselves, and what the controller tells them to do."""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL = 4
"""Raised whenever a peer of the number before could misread us; checked at hello."""

Phase = Literal["rollout", "inference", "train"]
"""What a shared device is used for; only placements that take turns have phases."""
Residence = Literal["absent", "disk", "host", "device"]
"""Where a component is; `absent`: it would have to be made anew."""

ProcessKind = Literal["controller", "generator", "reward", "inference", "learner", "client"]


class Message(msgspec.Struct, frozen=True):
    """What may travel over a channel: a new message is a class with this base and a tag of its own."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First words of whoever connects."""

    protocol: int
    kind: ProcessKind
    name: str
    """Unique within the run and stable over restarts, `generator-0`."""
    incarnation: str
    """Unique to this start of the process; another one under the same name replaces it."""
    pid: int


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Any process to the controller, every `control.heartbeat_s`: alive, and what it is doing."""

    name: str
    sent_s: float
    waiting_for: str = ""
    """Empty while it works; else what it waits for, in words: `weights of version 3`, `a batch`."""
    waiting_since_s: float = 0.0
    gauges: dict[str, float] = {}
    """Named as in observe/metrics.py: tokens generated so far, running requests, idle seconds, resident bytes."""


class LearnerReady(Message, frozen=True, tag="learner_ready"):
    """Learner to controller: model loaded or resumed; I stand at `version` and the model's folder can be opened."""

    version: int
    model_folder: str
    """Config and tokenizer (and first weights) in Hugging Face layout, for the generators."""
    metrics: dict[str, float] = {}
    """Of the warm start, where there was one."""
    checkpoint: str = ""
    """Folder of the checkpoint it comes from; empty: the run's initial model."""


class LoadModel(Message, frozen=True, tag="load_model"):
    """Controller to generator or inference worker: open this folder (or what the config names beside it) and get ready."""

    model_folder: str


class JoinTerms(Message, frozen=True, tag="join_terms"):
    """Controller to a generator that it did not start, first thing: what this run is told, and where it is."""

    config_toml: str
    """The resolved config; a generator that joins may differ in its engine's own settings only."""
    run_folder: str
    """On the run's machine."""
    machine: str
    """Host name of the run's machine: what only one machine can share is refused elsewhere."""


class EngineReady(Message, frozen=True, tag="engine_ready"):
    """Generator to controller: the engine is up and can take this much at once."""

    generator: str
    num_slots: int
    version: int
    """Version of the weights it holds, -1 when none yet."""


class EngineRoom(Message, frozen=True, tag="engine_room"):
    """Generator to controller: the engine can take this much at once by now, as its memory fills and empties."""

    generator: str
    num_slots: int


class ModelsReady(Message, frozen=True, tag="models_ready"):
    """Inference worker to controller: its models are in memory and it judges what it is sent."""

    worker: str
    models: tuple[str, ...]
    num_bytes: int
    """Of their weights."""


class Pause(Message, frozen=True, tag="pause"):
    """Stop generating; requests in flight stay where they are."""


class Resume(Message, frozen=True, tag="resume"):
    """Go on where Pause stopped."""


class ComponentMove(msgspec.Struct, frozen=True):
    """A component that was moved, or is to be."""

    component: str
    """`policy`, `policy optimizer`, `critic`, `reference`, `reward NAME`, `engine weights`, `KV cache`."""
    before: Residence
    after: Residence
    num_bytes: int
    seconds: float = 0.0


class SetPhase(Message, frozen=True, tag="set_phase"):
    """Controller to a process on a shared device: bring about what this phase needs of you, give back what it does not."""

    phase: Phase
    number: int
    """Grows with every switch; the answer bears it."""


class PhaseReached(Message, frozen=True, tag="phase_reached"):
    """Its answer: done, by these moves; this is what I hold on the device now."""

    name: str
    phase: Phase
    number: int
    moves: tuple[ComponentMove, ...] = ()
    resident: dict[str, int] = {}
    """Component to bytes on the device."""
    peak_bytes: int = 0
    """Most that was on the device during the phase that ended."""
    finished_s: float = 0.0
    """Clock seconds."""


class Shutdown(Message, frozen=True, tag="shutdown"):
    """Finish what cannot wait, close, and exit with 0."""

    reason: str = ""


class AbortGroup(Message, frozen=True, tag="abort_group"):
    """Controller to generator: stop at this group, it was dropped; its members come back as failures."""

    group_id: int


class Checkpoint(Message, frozen=True, tag="checkpoint"):
    """Controller to learner: write a checkpoint of the version you hold once you reach it."""

    version: int
    controller_json: str = ""
    """The controller's own part (data position, issued count), stored beside the model."""


class CheckpointDone(Message, frozen=True, tag="checkpoint_done"):
    """Learner to controller: the checkpoint is complete and on disk."""

    version: int
    folder: str
    seconds: float


class Fault(Message, frozen=True, tag="fault"):
    """Any process to the controller: I cannot go on; fatal says whether a restart could help."""

    name: str
    reason: str
    fatal: bool
    """True where a restart would meet the same end (non-finite loss, wrong config)."""
