"""What a run looks like at one moment: the value behind the live display, `asyncrl status` and GET /status."""

from __future__ import annotations

import msgspec


class StatusView(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot; everything in it is what the controller knows at `time_s`."""

    time_s: float
    run: str
    phase: str
    step: int = 0
    """Optimizer steps done, which is also the learner's version."""
    num_steps: int = 0
    version: int = 0
    started_s: float = 0.0
    reward_mean: float = 0.0
    """Of the last step."""
    rewards: tuple[float, ...] = ()
    """Mean reward of the last steps, oldest first; at most 60 or so."""
    staleness_mean: float = 0.0
    staleness_max: int = 0
    max_staleness: int = 0
    groups_ready: int = 0
    groups_running: int = 0
    groups_scoring: int = 0
    generated_tokens_per_s: float = 0.0
    trained_tokens_per_s: float = 0.0
    learner_idle: float = 0.0
    generators_idle: float = 0.0
    weight_sync_ms: float = 0.0
    waiting: str = ""
    """Who waits for whom, in one line; empty where nobody waits."""
    processes: dict[str, str] = {}
    """Process name to its state in a word or two."""
    events: tuple[str, ...] = ()
    """The last things worth telling, oldest first."""
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    reason: str = ""
    """Why the run ended, once it has."""
