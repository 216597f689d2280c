"""What the stages without variants are told: inference, buffer, packing, transport. Every knob has one owner."""

from __future__ import annotations

from typing import Literal

from asyncrl.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, _Stage


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
    """Workers that run reference and reward models forward only, beside generation; started where something needs them.

    On the learner's own device, where phases take turns, they have a phase of their own (docs/placement.md).
    """

    num_workers: PositiveInt = 1
    reward_models: tuple[RewardModel, ...] = ()
    tokens_per_batch: PositiveInt = 8192
    """Tokens of one packed forward pass."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the reference."""
    num_threads: PositiveInt = 1


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


class PackingConfig(_Stage, frozen=True):
    """How samples share micro-batches."""

    tokens_per_row: PositiveInt = 4096
    """Token budget of one micro-batch; a longer single sample is an error before it is generated."""


class TransportConfig(_Stage, frozen=True):
    """The data and control channels."""

    kind: Literal["ipc", "tcp"] = "ipc"
    host: str = "127.0.0.1"
    """Only with `tcp`; anything but loopback opens the run to the network (CURVE keys still apply)."""
    encryption: Literal["curve", "plain"] = "curve"
    window: PositiveInt = 256
    """Most messages sent and not yet acknowledged, per connection and direction."""
    max_message_bytes: PositiveInt = 256 << 20
