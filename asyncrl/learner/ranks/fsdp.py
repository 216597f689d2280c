"""Models and tensors divided over the learner's ranks (FSDP2, prepared by accelerate), and gathered again to be saved.

Each decoder layer is a unit, gathered for its own forward and backward. The rest (embeddings, last norm, output layer, tied or
not) is one more unit, gathered for a complete pass. The learner runs a model's parts one by one, so that the output layer never
gets all tokens at once; `models/logprobs.run_inside` marks the beginning and end of such a pass.

Losses are a local numerator over a denominator of all ranks, so gradients are summed over ranks, not averaged, and in float32.

Invariants: parameters keep their names; a parameter is a DTensor between passes; all ranks call everything here in the same
order; gathering and dividing change no bit, and saved files do not depend on the number of ranks. With one rank there is no
group, nothing is divided, and accelerate is not imported (it takes seconds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from asyncrl.errors import LearnerError
from asyncrl.learner.ranks.group import whole
from asyncrl.models.logprobs import INSIDE
from asyncrl.residency.components import HELD_TOO

T = TypeVar("T")
M = TypeVar("M", bound=torch.nn.Module)

AXIS = "ranks"


class Divider:
    """Divides models over the ranks of the default process group, in place; with one rank it changes nothing."""

    def __init__(self, device: str, num_ranks: int) -> None:
        """Store the ranks, each on its current device of this kind."""
        self._mesh: DeviceMesh | None = None
        if num_ranks > 1:
            self._mesh = init_device_mesh(torch.device(device).type, (num_ranks,), mesh_dim_names=(AXIS,))

    def policy(self, model: PreTrainedModel) -> PreTrainedModel:
        """Divide a policy or reference; return it.

        Args:
            model: The same complete model on every rank, on its device or on the CPU (then moved to the device unit by unit).
        """
        if self._mesh is None:
            return model
        root = _Root(model)
        _prepare(root, self._mesh, model)
        for part in (model, model.base_model):
            setattr(part, INSIDE, root.run_pass)
        setattr(model, HELD_TOO, lambda: list(_held_by_fsdp(root)))
        return model

    def critic(self, critic: M) -> M:
        """Divide a critic; return it. Its `output` layer is a separate unit, because its body may have another dtype."""
        if self._mesh is None:
            return critic
        output, body = cast("torch.nn.Module", critic.output), getattr(critic, "body", None)
        _prepare(output, self._mesh, None)
        if body is not None:
            _prepare(critic, self._mesh, body)
        setattr(critic, HELD_TOO, lambda: list(_held_by_fsdp(critic)))
        return critic


def whole_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor complete and on the CPU, gathered one at a time; every rank must iterate over all of them.

    Args:
        named: A model's parameters or an optimizer's state, the same names in the same order on every rank.
    """
    for name, tensor in named:
        yield name, whole(tensor).cpu()


def save_whole(named: Iterable[tuple[str, torch.Tensor]], path: Path) -> None:
    """Write `whole_tensors` to a safetensors file; of several ranks one calls this, while the others iterate over them."""
    save_file({name: tensor.contiguous() for name, tensor in whole_tensors(named)}, path)


class _Root(torch.nn.Module):
    """Represents a complete pass over a model: the caller's code, run inside this module's forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self._is_inside = False

    def forward(self, work: Callable[[], T]) -> T:
        # FSDP registers its hooks on what is returned; changing a view in place would drop them.
        owning = tree_map_only(torch.Tensor, lambda one: one if one._base is None else one.clone(), work())  # noqa: SLF001
        return cast("T", owning)

    def run_pass(self, work: Callable[[], T]) -> T:
        """Run one pass; a pass within a pass is part of the outer one."""
        if self._is_inside:
            return work()
        self._is_inside = True
        try:
            result: T = self(work)
        finally:
            self._is_inside = False
        if not torch.is_grad_enabled():
            # Without a backward, nothing else would divide the root's weights again.
            cast("FSDPModule", self).reshard()
        return result


def _prepare(root: torch.nn.Module, mesh: DeviceMesh, transformer: PreTrainedModel | None) -> None:
    """Divide `root` in place, with each decoder layer of `transformer` as a separate unit."""
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model  # noqa: PLC0415 - takes seconds

    layers: list[str] = []
    if transformer is not None:
        present = {type(module).__name__ for module in transformer.modules()}
        layers = sorted(set(transformer._no_split_modules or ()) & present)  # noqa: SLF001 - transformers has no public reader
    plugin = FullyShardedDataParallelPlugin(  # type: ignore[no-untyped-call]
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap" if layers else "no_wrap",
        transformer_cls_names_to_wrap=layers,
        mixed_precision_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
        cpu_ram_efficient_loading=False,
    )
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    # The fields of an `Accelerator` that are read. The class itself supports FSDP on GPUs only, and has global state.
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        device=device,
        parallelism_config=SimpleNamespace(fsdp_dim_names=(AXIS,)),
        mixed_precision="no",
        is_main_process=False,
    )
    prepared: torch.nn.Module = fsdp2_prepare_model(accelerator, root)
    for module in prepared.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this, a factor of 1 becomes a pre-multiplied sum, which gloo does not support.
            module.set_force_sum_reduction_for_comms(True)


def _held_by_fsdp(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the flat tensor of each shard from which FSDP gathers; torch has no public reader.

    Raises:
        LearnerError: The tensor is not where torch 2.8 to 2.13 keep it. Moving the shards would cause training on old bytes.
    """
    units: list[Any] = [module._get_fsdp_state() for module in root.modules() if isinstance(module, FSDPModule)]  # noqa: SLF001
    groups = [group for unit in units for group in getattr(unit, "_fsdp_param_groups", None) or [unit._fsdp_param_group]]  # noqa: SLF001
    shards = [shard for group in groups if group is not None for shard in group.fsdp_params]
    for number, shard in enumerate(shards):
        flat, part = shard._sharded_param_data, shard.sharded_param._local_tensor  # noqa: SLF001
        if part.numel() and flat.untyped_storage().data_ptr() != part.untyped_storage().data_ptr():
            raise LearnerError(f"torch {torch.__version__} keeps shards elsewhere than is known here: set learner.ranks = 1")
        yield f"shard {number}", flat
