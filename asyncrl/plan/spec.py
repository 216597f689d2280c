"""The input of the planner: a model, an algorithm, a placement and the hardware.

Figures of named accelerators are from the vendors' data sheets: dense, per device, link speeds in one direction. Sizes of named
models are from their own config.json files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import ConfigError
from asyncrl.models.memory import BYTES, ModelShape, shape_of_json
from asyncrl.plan.simulator.scenario import typed_fields

GIB = 2**30
LEAST_PARAMETERS = 2e7
"""Minimum for a model given by a number: its vocabulary alone has nearly as many."""
MOST_GPUS = 1 << 16
"""Maximum number of GPUs of a plan."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device."""

    name: str
    memory_bytes: float
    bf16_flops: float
    """Floating-point operations a second, dense, bf16 with float32 sums."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To another device of the same machine (NVLink, otherwise PCIe), one direction."""
    network_bytes_per_s: float
    """To another machine, this device's share."""
    host_bytes_per_s: float
    """To the memory of its own machine (PCIe), one way."""
    dollars_per_hour: float
    """A usual rental price; set your own with `--set dollars_per_hour=`."""


_UNITS = (1e9, 1e12, 1e12, 1e9, 1e9, 1e9, 1.0)
ACCELERATORS = {
    name: Accelerator(name, *(figure * unit for figure, unit in zip(figures, _UNITS, strict=True)))
    for name, figures in {
        "B200": (180, 2250, 8.0, 900, 50, 64, 5.0),
        "H200": (141, 989, 4.8, 450, 50, 64, 3.5),
        "H100": (80, 989, 3.35, 450, 50, 64, 2.8),
        "A100": (80, 312, 2.04, 300, 25, 32, 1.7),
        "A100-40": (40, 312, 1.56, 300, 25, 32, 1.3),
        "L40S": (48, 362, 0.864, 32, 12.5, 32, 1.0),
        "RTX4090": (24, 165, 1.01, 32, 1.25, 32, 0.5),
    }.items()
}
"""Sources: NVIDIA data sheets of each product. Network: 400 Gbit/s a device for Hopper and later, 200 for Ampere."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines of equal devices."""

    accelerator: Accelerator
    num_gpus: int
    gpus_per_node: int = 8

    @property
    def num_nodes(self) -> int:
        """Return the number of machines."""
        return -(-self.num_gpus // self.gpus_per_node)


def parse_cluster(text: str, gpus_per_node: int = 8) -> Cluster:
    """Return the cluster that `64xH100` (or `H100`) names.

    Raises:
        ConfigError: The device is unknown, or the number is invalid.
    """
    match = re.fullmatch(r"(?:(\d+)x)?([A-Za-z0-9-]+)", text)
    known = {name.lower(): item for name, item in ACCELERATORS.items()}
    if match is None or match[2].lower() not in known or not 1 <= float(match[1] or 1) <= MOST_GPUS:
        devices = f"at most {MOST_GPUS}, with one of {', '.join(ACCELERATORS)}"
        raise ConfigError(f"hardware must be NUMBERxDEVICE, as 64xH100, {devices}; got {text!r}")
    return Cluster(known[match[2].lower()], int(match[1] or 1), gpus_per_node)


def find_model(text: str) -> ModelShape:
    """Return a model by name, by the path of its folder or config.json, or by a round number of parameters (`1B`).

    Raises:
        ConfigError: It is none of these.
    """
    if text.lower() in NAMED:
        return NAMED[text.lower()]
    number = re.fullmatch(r"(\d+(?:\.\d+)?)[bB]", text)
    if number is not None:
        # With the proportions of Llama.
        shapes, parameters, vocabulary = list[ModelShape](), float(number[1]) * 1e9, 32_000
        if parameters < LEAST_PARAMETERS:
            raise ConfigError(f"a number of parameters must be at least {LEAST_PARAMETERS / 1e9:g}B, got {text!r}")
        for hidden in (256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384):
            layers, heads = max(2, hidden // 128), hidden // 128
            block = (parameters - (2 * vocabulary + 1) * hidden) / layers - 2 * hidden
            intermediate = max(1, round((block - 4 * hidden * hidden) / (3 * hidden)))
            shapes.append(ModelShape(hidden, layers, heads, heads, 128, intermediate, vocabulary, name=text))
        return min(shapes, key=lambda shape: abs(math.log(shape.intermediate / shape.hidden / 3)))
    path = Path(text)
    file = path / "config.json" if path.is_dir() else path
    try:
        return shape_of_json(json.loads(file.read_text(encoding="utf-8")), path.name)
    except (OSError, ValueError) as error:
        known = f"{', '.join(NAMED)}, a number of parameters (7B), or a config.json or its folder"
        raise ConfigError(f"model must be one of {known}; got {text!r} ({error})") from error


NAMED = {
    item.name: item
    for item in (
        ModelShape(576, 30, 9, 3, 64, 1536, 49152, is_tied=True, name="smollm2-135m"),
        ModelShape(896, 24, 14, 2, 64, 4864, 151936, is_tied=True, name="qwen2.5-0.5b"),
        ModelShape(1536, 28, 12, 2, 128, 8960, 151936, is_tied=True, name="qwen2.5-1.5b"),
        ModelShape(3584, 28, 28, 4, 128, 18944, 152064, name="qwen2.5-7b"),
        ModelShape(5120, 64, 40, 8, 128, 27648, 152064, name="qwen2.5-32b"),
        ModelShape(4096, 32, 32, 8, 128, 14336, 128256, name="llama-3-8b"),
        ModelShape(8192, 80, 64, 8, 128, 28672, 128256, name="llama-3-70b"),
        ModelShape(2048, 48, 32, 4, 128, 768, 151936, num_experts=128, experts_per_token=8, name="qwen3-30b-a3b"),
        ModelShape(4096, 94, 64, 4, 128, 1536, 151936, num_experts=128, experts_per_token=8, name="qwen3-235b-a22b"),
    )
}
"""Sources: the models' own config.json files."""


Placement = Literal["disaggregated", "colocated", "hybrid", "async_hybrid"]
Algorithm = Literal["grpo", "ppo", "dpo"]
_MAY_BE_0 = {"lora_rank", "max_staleness", "tensor_parallel", "num_generation_gpus"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A run to be planned."""

    model: ModelShape
    cluster: Cluster
    algorithm: Algorithm = "grpo"
    placement: Placement = "disaggregated"
    has_reference: bool = False
    """Whether there is a frozen copy of the policy for KL; with LoRA the base is the reference."""
    critic: ModelShape | None = None
    """The separate value model of PPO; None: no critic."""
    reward_model: ModelShape | None = None
    lora_rank: int = 0
    """0: all parameters are trained."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    offload_optimizer: bool = False
    gradient_checkpointing: bool = True
    """Keep the activations of one layer at a time; the others are recomputed in the backward pass."""
    groups_per_step: int = 64
    group_size: int = 8
    prompt_tokens: int = 512
    response_tokens: int = 2048
    """Mean."""
    max_sequence_tokens: int = 8192
    """Maximum length of a sample: prompt and response."""
    tokens_per_row: int = 16384
    max_staleness: int = 2
    tensor_parallel: int = 0
    """GPUs of one engine; 0: as few as hold the weights and a useful cache."""
    num_generation_gpus: int = 0
    """0: the split that balances generation and training."""
    memory_share: float = 0.9
    """Share of a device's memory that the plan may use."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values that are too small, or contradict each other."""
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {"gpus_per_node": self.cluster.gpus_per_node}
        for name, value in values.items():
            if type(value) is int and value < (least := int(name not in _MAY_BE_0)):
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        if self.tensor_parallel and self.model.heads % self.tensor_parallel:
            raise ConfigError(f"tensor_parallel must divide the model's {self.model.heads} heads, got {self.tensor_parallel}")
        if (price := self.cluster.accelerator.dollars_per_hour) < 0:
            raise ConfigError(f"dollars_per_hour must be at least 0, got {price:g}")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share must be above 0 and at most 1, got {self.memory_share:g}")
        longest, mean = self.max_sequence_tokens, self.prompt_tokens + self.response_tokens
        if mean > longest:
            raise ConfigError(
                f"max_sequence_tokens ({longest}) must hold a mean sample: prompt_tokens and response_tokens ({mean})"
            )
        if longest > self.tokens_per_row:
            raise ConfigError(f"tokens_per_row ({self.tokens_per_row}) must be at least max_sequence_tokens ({longest})")
        if self.num_generation_gpus >= self.cluster.num_gpus and self.placement == "disaggregated" and self.num_generation_gpus:
            most = f"{self.cluster.num_gpus}, all there are, got {self.num_generation_gpus}"
            raise ConfigError(f"num_generation_gpus must be under {most}: disaggregated training needs its own")

    @property
    def samples_per_step(self) -> int:
        """Return groups x members."""
        return self.groups_per_step * self.group_size

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens that one step trains on, prompts included."""
        return self.samples_per_step * (self.prompt_tokens + self.response_tokens)

    @property
    def bytes_per_weight(self) -> int:
        """Return the bytes of one weight in the compute dtype."""
        return BYTES[self.dtype]

    @property
    def lora_parameters(self) -> int:
        """Return the number of parameters of adapters on every linear layer: rank x (inputs + outputs)."""
        return self.model.adapter_parameters(LoRAConfig(rank=self.lora_rank)) if self.lora_rank else 0

    @property
    def version_bytes(self) -> int:
        """Return the bytes that one weight version sends."""
        return (self.lora_parameters or self.model.parameters) * self.bytes_per_weight


OF_CLUSTER = {"gpus_per_node": int, "dollars_per_hour": float}
"""Overrides that are not fields of Question."""


def ask(
    model: str,
    hardware: str,
    *,
    algorithm: Algorithm = "grpo",
    placement: Placement = "disaggregated",
    critic: str = "",
    reward_model: str = "",
    overrides: Sequence[str] = (),
) -> Question:
    """Return the question; models are given as for `find_model`, hardware as for `parse_cluster`.

    PPO has a reference and a critic; the critic's model is the policy's unless another is given. DPO has a reference. Overrides
    are `field=value` of Question, `gpus_per_node=value` or `dollars_per_hour=value`.

    Raises:
        ConfigError: An argument or override is invalid; the message lists what is allowed.
    """
    if critic and algorithm != "ppo":
        raise ConfigError(f"algorithm {algorithm!r} has no critic: leave out critic {critic!r}, or set algorithm ppo")
    values = typed_fields(Question, overrides, OF_CLUSTER)
    cluster = parse_cluster(hardware, values.pop("gpus_per_node", 8))
    price = values.pop("dollars_per_hour", cluster.accelerator.dollars_per_hour)
    policy = find_model(model)
    return Question(
        model=policy,
        cluster=replace(cluster, accelerator=replace(cluster.accelerator, dollars_per_hour=price)),
        critic=(find_model(critic) if critic else policy) if algorithm == "ppo" else None,
        reward_model=find_model(reward_model) if reward_model else None,
        **({"has_reference": algorithm != "grpo", "algorithm": algorithm, "placement": placement} | values),
    )
