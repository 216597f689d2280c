"""Weights as Hugging Face lays them out on disk: safetensors, in shards of bounded size, with an index where there are several.

Invariants: what is written is exactly what the architecture has, by name and shape; at most one shard is in memory at a time.
Called by learner/import_model.py and learner/checkpoint.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from asyncrl.errors import ConfigError

SHARD_BYTES = 4 << 30


def stored_tensors(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of these safetensors files by name.

    Raises:
        ConfigError: One of them is not such a file.
    """
    for path in files:
        try:
            opened = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ConfigError(f"{path} is not a safetensors file: {error}") from error
        with opened:
            for name in opened.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - not iterable
                yield name, opened.get_tensor(name)  # type: ignore[no-untyped-call]


def save_tensors(
    tensors: Iterator[tuple[str, torch.Tensor]], config: PretrainedConfig, folder: Path, dtype: str | None, source: str
) -> int:
    """Write a whole model's weights to `folder`.

    Args:
        tensors: Name and values, each name once.
        config: What the names and shapes must agree with; a tied head may be absent.
        folder: Empty of weights.
        dtype: Of what is written, a torch name; None: as given.
        source: What to call the origin in errors.

    Returns:
        The number of parameters.

    Raises:
        ConfigError: A tensor is missing, repeated, unknown or of another shape; the folder is then of no use.
    """
    expected, optional = _expected_shapes(config, source)
    shard: dict[str, torch.Tensor] = {}
    shards: list[list[str]] = []
    seen: set[str] = set()
    num_parameters = total_bytes = shard_bytes = 0
    for name, tensor in tensors:
        _check_tensor(name, tuple(tensor.shape), expected, source)
        if name in seen:
            raise ConfigError(f"{source} holds the tensor {name} twice")
        saved = tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor
        if shard and shard_bytes + saved.nbytes > SHARD_BYTES:
            shards.append(_write_shard(shard, folder, len(shards)))
            shard, shard_bytes = {}, 0
        shard[name] = saved.contiguous()
        seen.add(name)
        shard_bytes += saved.nbytes
        total_bytes += saved.nbytes
        num_parameters += saved.numel()
    if missing := sorted(expected.keys() - seen - optional):
        raise ConfigError(f"{source} lacks {len(missing)} of {len(expected)} tensors, {missing[0]} among them; it is incomplete")
    shards.append(_write_shard(shard, folder, len(shards)))
    _name_shards(shards, folder, total_bytes)
    return num_parameters


def _expected_shapes(config: PretrainedConfig, source: str) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return name to shape of all tensors of this architecture, and those that tying makes superfluous."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigError(f"{source} is not a causal language model: {str(error).splitlines()[0][:200]}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return shapes, {"lm_head.weight"} if config.tie_word_embeddings else set()


def _check_tensor(name: str, shape: tuple[int, ...], expected: Mapping[str, tuple[int, ...]], source: str) -> None:
    if name not in expected:
        raise ConfigError(f"{source} holds a tensor {name} that its architecture does not have")
    if shape != expected[name]:
        raise ConfigError(f"{source}: tensor {name} is {list(shape)}, the config says {list(expected[name])}")


def _write_shard(shard: Mapping[str, torch.Tensor], folder: Path, number: int) -> list[str]:
    path = folder / f"shard-{number}"
    save_file(dict(shard), path, metadata={"format": "pt"})
    path.chmod(0o644)
    with path.open("rb") as written:
        os.fsync(written.fileno())
    return list(shard)


def _name_shards(shards: list[list[str]], folder: Path, total_bytes: int) -> None:
    """Give the shards the names transformers looks for, with an index where there are several."""
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file_name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
