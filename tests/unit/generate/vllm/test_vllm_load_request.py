import asyncio
import os
import platform
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import GenerationError
from asyncrl.folders import lock_folder
from asyncrl.generate.vllm.checkpoint import ModelFolder, Part
from asyncrl.generate.vllm.load_request import (
    FileSource,
    LoadReply,
    LoadRequest,
    ReceiverSource,
    load_request,
    load_request_on_thread,
)
from asyncrl.generate.vllm.worker_extension import WeightsExtension, merged
from asyncrl.models.layout import make_manifest, view_tensors
from asyncrl.weights.tensors import MappedTensors
from tests.contract.engines.conftest import deferred

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPES = {EMBEDDING: (4, 2), "norm.weight": (2,)}
FOLDER = ModelFolder(Path("model"), SHAPES, 4, frozenset(), "float32", "llama", 32, 16, {HEAD: EMBEDDING})


def tensors() -> dict[str, torch.Tensor]:
    return {EMBEDDING: torch.arange(8.0).view(4, 2), "norm.weight": torch.ones(2)}


def test_a_server_elsewhere_is_given_what_lies_in_the_shared_folder_and_a_copy_there_of_what_does_not(tmp_path: Path) -> None:
    manifest = make_manifest(tensors())
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    for name, view in view_tensors(flat, manifest).items():
        view.copy_(tensors()[name])
    inside = MappedTensors(manifest, flat, str(tmp_path / "slot"), 64)
    with load_request(inside, FOLDER, shared_folder=str(tmp_path)) as load:
        assert load.source == FileSource(str(tmp_path / "slot"), 64, manifest)
    with load_request(MappedTensors(manifest, flat, "/elsewhere", 64), FOLDER, shared_folder=str(tmp_path)) as load:
        assert isinstance(load.source, FileSource)
        copied = Path(load.source.path)
        assert copied.parent.parent == tmp_path
        assert copied.read_bytes() == flat.numpy().tobytes()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_of_this_machine_left_there_goes(tmp_path: Path) -> None:
    host = platform.node()
    left, locked, elsewhere = (tmp_path / f"asyncrl-weights@{name}" for name in (f"{host}@a", f"{host}@b", f"{host}-2@c"))
    for path in (left, locked, elsewhere):
        path.mkdir()
    lock = lock_folder(locked)
    with load_request(tensors(), FOLDER, shared_folder=str(tmp_path)):
        assert not left.exists()
    os.close(lock)
    assert {*tmp_path.iterdir()} == {locked, elsewhere}


@pytest.mark.parametrize(("fingerprint", "is_untouched"), [("nothing", True), ("half", False)])
def test_a_worker_says_whether_it_has_changed_anything(monkeypatch, tmp_path: Path, fingerprint, is_untouched) -> None:
    """Over stand-ins for what it calls of vLLM: the order of things is ours."""
    touched, model = [], torch.nn.Linear(2, 2)
    model.load_weights = list
    layerwise = {"get_layerwise_info": lambda _: None, "finalize_layerwise_reload": lambda *_: None}
    parts = {
        "config": SimpleNamespace(set_current_vllm_config=lambda _: nullcontext()),
        "model_executor.layers.vocab_parallel_embedding": SimpleNamespace(ParallelLMHead=torch.nn.Embedding),
        "model_executor.model_loader.reload": SimpleNamespace(initialize_layerwise_reload=touched.append, **layerwise),
        "model_executor.model_loader.reload.layerwise": SimpleNamespace(**layerwise),
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", part)
    worker = WeightsExtension()
    worker.device, worker.vllm_config = "cpu", None
    worker.model_runner = SimpleNamespace(get_model=lambda: model, model_config=None)
    given = deferred(tensors() | {"last": torch.ones(2)}, tmp_path, fingerprint)
    order = LoadRequest(ReceiverSource(given.receiver, "{}", given.available))
    reply = msgspec.json.decode(worker.asyncrl_load(msgspec.json.encode(order).decode()), type=LoadReply)
    assert reply == LoadReply("broadcast", "the sender is gone", is_untouched)
    assert bool(touched) is not is_untouched


A, B = "layer.q_proj.lora_A.default.weight", "layer.q_proj.lora_B.default.weight"
LORA = LoRAConfig(rank=2, alpha=6.0, target_modules=("q_proj",))


def folder_of(tmp_path, model_type: str = "llama") -> ModelFolder:
    shapes = {"layer.q_proj.weight": (3, 4) if model_type == "gpt2" else (4, 3), "norm.weight": (3,)}
    return ModelFolder(tmp_path, shapes, 8, frozenset(), "float32", model_type, 32, 16)


def base_of(folder: ModelFolder):
    with load_request({A: torch.zeros(2, 3), B: torch.zeros(4, 2)}, folder, LORA) as load:
        return load.base


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_the_merged_layer_is_base_plus_scaled_product_and_others_are_as_they_were(tmp_path, model_type: str) -> None:
    """Of GPT-2 layers are stored input first, and the product is transposed."""
    folder = folder_of(tmp_path, model_type)
    base = {name: torch.randn(shape) for name, shape in folder.shapes.items()}
    save_file(base, tmp_path / "model.safetensors")
    a, b = torch.randn(2, 3), torch.randn(4, 2)
    found = dict(merged([(A, a), (B, b)], base_of(folder), torch.device("cpu")))
    product = b @ a if model_type == "llama" else (b @ a).T
    assert torch.allclose(found["layer.q_proj.weight"], base["layer.q_proj.weight"] + 3.0 * product)
    assert torch.equal(found["norm.weight"], base["norm.weight"])


def test_adapters_of_a_layer_that_the_checkpoint_has_under_another_name_are_refused(tmp_path) -> None:
    part = Part("attention.query.weight", (4, 3), (3, 1), 0)
    folder = replace(folder_of(tmp_path), parts={"layer.q_proj.weight": (part,)})
    with pytest.raises(GenerationError, match="this model does not have, the first: layer"):
        base_of(folder)


class SlowTensors(dict):
    """Tensors that are looked at slowly."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.is_looked_at, self.may_go_on = threading.Event(), threading.Event()

    def items(self):
        self.is_looked_at.set()
        self.may_go_on.wait(30)
        return super().items()


async def test_a_load_that_is_cancelled_while_it_is_prepared_leaves_no_file(tmp_path) -> None:
    slow = SlowTensors(tensors())

    async def load() -> None:
        async with load_request_on_thread(slow, FOLDER, None, str(tmp_path)):
            pytest.fail("it was cancelled")

    loading = asyncio.get_running_loop().create_task(load())
    assert await asyncio.to_thread(slow.is_looked_at.wait, 30)
    loading.cancel()
    await asyncio.wait({loading}, timeout=0.1)
    assert not loading.done()  # it waits for what its thread will have written
    slow.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert not list(tmp_path.iterdir())
