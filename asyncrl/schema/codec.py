"""Bytes on the wire, both ways. (Skeleton: the union of everything that may cross a channel.)"""

from __future__ import annotations

from asyncrl.schema.batches import GroupsTaken, StepBatch, StepDone
from asyncrl.schema.control import (
    AbortGroup,
    Checkpoint,
    CheckpointDone,
    EngineReady,
    Fault,
    Heartbeat,
    LearnerReady,
    LoadModel,
    Pause,
    Resume,
    Shutdown,
)
from asyncrl.schema.samples import GroupWork, Sample, SampleFailure, Score, ScoreRequest, ScoredGroup
from asyncrl.schema.weights import VersionLive, WeightsAvailable

Message = (
    GroupWork
    | Sample
    | SampleFailure
    | ScoreRequest
    | Score
    | ScoredGroup
    | GroupsTaken
    | StepBatch
    | StepDone
    | WeightsAvailable
    | VersionLive
    | Heartbeat
    | LearnerReady
    | LoadModel
    | EngineReady
    | Pause
    | Resume
    | Shutdown
    | AbortGroup
    | Checkpoint
    | CheckpointDone
    | Fault
)
"""Everything that may travel over a channel, told apart by tag."""
