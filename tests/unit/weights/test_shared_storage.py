"""One copy of the weights for learner and engine: what is shared, what is checked, what is refused."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.clock import SystemClock
from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.errors import BroadcastError, GenerationError
from asyncrl.generate.transformers.model import SlotModel
from asyncrl.generate.transformers.weight_loader import WeightsInPlace
from asyncrl.models.layout import copy_out, make_manifest, view_tensors
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.media.learner_memory import HybridPublisher, HybridSubscriber
from asyncrl.weights.shm_segments import remove_leftover_segments
from asyncrl.weights.tensors import SharedTensors


def a_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))


class Ends:
    """A learner's model with its publisher, and a generator's subscriber."""

    def __init__(self, run_folder: Path) -> None:
        self.model = a_model()
        self.announced: list[WeightsAvailable] = []
        self.publisher = HybridPublisher(BroadcastConfig(), run_folder, self.announced.append, SystemClock())
        self.subscriber = HybridSubscriber(run_folder, "cpu")

    def publish(self, version: int) -> WeightsAvailable:
        self.publisher.publish(version, dict(self.model.named_parameters()))
        return self.announced[-1]


@pytest.fixture
def ends(tmp_path: Path):
    made = Ends(tmp_path)
    yield made
    made.subscriber.close()
    made.publisher.close()
    assert remove_leftover_segments(tmp_path) == []


async def test_a_change_that_was_not_published_is_refused(ends):
    available = ends.publish(0)
    with torch.no_grad():
        ends.model[0].bias.add_(1.0)
    with pytest.raises(BroadcastError, match="damaged"):
        await ends.subscriber.fetch(available)


async def test_a_version_made_while_the_one_before_is_in_use_is_noticed(ends):
    tensors = await ends.subscriber.fetch(ends.publish(0))
    tensors.check()
    ends.publish(1)
    with pytest.raises(BroadcastError, match="phases did not keep training and sampling apart"):
        tensors.check()


def test_a_parameter_that_was_moved_away_cannot_be_published(ends):
    ends.publish(0)
    ends.model[0].weight.data = ends.model[0].weight.data.clone()
    with pytest.raises(BroadcastError, match=r"0\.weight has left the memory"):
        ends.publish(1)


async def test_another_dtype_is_refused_and_nothing_is_adopted(ends):
    engine = a_model().bfloat16()
    before = engine[0].weight.data_ptr()
    tensors = await ends.subscriber.fetch(ends.publish(0))
    with pytest.raises(GenerationError, match=r"generate\.engine\.dtype"):
        WeightsInPlace(engine).adopt(tensors)
    assert engine[0].weight.data_ptr() == before


def test_on_a_gpu_the_first_adoption_and_every_sleep_return_memory_to_the_driver(monkeypatch):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
    model, learner = (LlamaForCausalLM(LlamaConfig(**sizes)) for _ in range(2))
    engine, times = SlotModel(model, TransformersEngineConfig(num_slots=1), adapters_only=False), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: times.append(len(times)))
    engine.sleep()
    engine.wake()
    assert times == []
    engine.device = torch.device("cuda")  # no tensor is there
    named = dict(learner.named_parameters())
    manifest = make_manifest(named, "model", 1 << 20)
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    copy_out(named, view_tensors(flat, manifest))
    for _ in range(2):
        engine.load_weights(SharedTensors(manifest, flat))
    assert len(times) == 1
    for switch in (2, 3):
        engine.sleep()
        assert len(times) == switch
        engine.wake()
