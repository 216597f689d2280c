"""The media that end on a GPU: `cuda_ipc` in one, `nccl` from one to another. Reported as not run where there is none."""

import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.clock import SystemClock
from asyncrl.config.broadcast import BroadcastConfig, CUDAIPCMedium, MediumConfig, NCCLMedium
from asyncrl.models.layout import view_tensors
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.buckets import device_fingerprints
from asyncrl.weights.media.registry import receiver_of
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.tensors import DeferredTensors
from tests.contract.engine_cases import transformers_engine

NUM_GPUS = torch.cuda.device_count()
TIMEOUT_S = 60
LEARNER = """
import json, queue, sys
from pathlib import Path
import msgspec, torch
from asyncrl.weights.publisher import Publisher
from asyncrl.clock import SystemClock
from asyncrl.config.broadcast import BroadcastConfig
from transformers import AutoModelForCausalLM

config, folder = msgspec.json.decode(sys.argv[1], type=BroadcastConfig), Path(sys.argv[2])
model_folder, device = sys.argv[3:]
model = AutoModelForCausalLM.from_pretrained(model_folder).to(device)
announced = queue.SimpleQueue()
publisher = Publisher(config, folder, announced.put, SystemClock())
for version, line in enumerate(sys.stdin, start=1):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    publisher.publish(version, dict(model.named_parameters()))
    with torch.no_grad():
        ids = torch.tensor([[5, 6, 7, 8, 9, 10]], device=device)
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    available = announced.get(timeout=60)
    print(msgspec.json.encode({"available": available, "logprobs": logprobs.tolist()}).decode(), flush=True)
publisher.close()
"""


class Published(msgspec.Struct):
    available: WeightsAvailable
    logprobs: list[float]


class Learner:
    """A publisher in a process of its own."""

    def __init__(self, config: BroadcastConfig, run_folder: Path, model_folder: Path, device: str) -> None:
        arguments = [msgspec.json.encode(config).decode(), str(run_folder), str(model_folder), device]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEARNER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
        )

    def publish(self) -> Published:
        self.process.stdin.write(b"next\n")
        self.process.stdin.flush()
        return msgspec.json.decode(self.process.stdout.readline(), type=Published)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(TIMEOUT_S)
        self.process.stdout.close()


TWO_GPUS = pytest.mark.skipif(NUM_GPUS < 2, reason="not run: NCCL wants learner and engine on two GPUs")
MEDIA = [
    pytest.param(CUDAIPCMedium(), "cuda:0", "cuda:0", id="cuda_ipc"),
    pytest.param(CUDAIPCMedium(), "cuda:0", "cuda", id="cuda_ipc to a GPU without a number"),
    pytest.param(NCCLMedium(gather_s=0.1), "cuda:0", "cuda:1", id="nccl", marks=TWO_GPUS),
    pytest.param(NCCLMedium(gather_s=0.1), "cuda:1", "cuda", id="nccl to a GPU without a number", marks=TWO_GPUS),
]


@pytest.fixture
def learner(medium: MediumConfig, learner_device: str, tmp_path: Path, model_folder: Path) -> Iterator[Learner]:
    learner = Learner(BroadcastConfig(medium=medium, bucket_bytes=64 << 10), tmp_path, model_folder, learner_device)
    yield learner
    learner.close()


@pytest.mark.parametrize(("medium", "learner_device", "device"), MEDIA)
async def test_version_after_version_arrives_on_the_engines_gpu(medium, device, learner, tmp_path, model_folder):
    async with transformers_engine(model_folder, 2, device=device) as engine:
        for version in range(1, 6):
            published = learner.publish()
            receiver, arguments = receiver_of(medium, tmp_path)
            await engine.load_weights(version, DeferredTensors(published.available, receiver, arguments), "keep")
            assert await engine.score([5, 6, 7, 8, 9, 10]) == pytest.approx(published.logprobs, abs=1e-4)


def test_a_fingerprint_is_the_same_on_the_gpu_and_on_the_cpu():
    content = torch.randint(0, 256, (40 << 20,), dtype=torch.uint8)
    ends = (8 << 20, (8 << 20) + 64, 40 << 20)
    on_cpu = device_fingerprints(content, ends, torch.device("cpu"))
    gpu = torch.device("cuda:0")
    assert device_fingerprints(content, ends, gpu) == on_cpu
    assert device_fingerprints(content.to(gpu), ends, gpu) == on_cpu


def test_all_versions_of_a_publisher_are_fingerprinted_on_one_stream(tmp_path, model_folder, monkeypatch):
    """torch caches memory by stream: a new one for each version would keep the blocks of 32."""
    streams, announced = list[int](), queue.SimpleQueue[WeightsAvailable]()

    def noted(*arguments: Any) -> bytes:
        streams.append(torch.cuda.current_stream().cuda_stream)
        return device_fingerprints(*arguments)

    monkeypatch.setattr("asyncrl.weights.publisher.device_fingerprints", noted)
    model = AutoModelForCausalLM.from_pretrained(model_folder).to("cuda:0")
    publisher = Publisher(BroadcastConfig(medium=CUDAIPCMedium()), tmp_path, announced.put, SystemClock())
    for version in (1, 2, 3):
        publisher.publish(version, dict(model.named_parameters()))
        announced.get(timeout=TIMEOUT_S)
    publisher.close()
    assert len(streams) == 3
    assert len(set(streams)) == 1
    assert streams[0] != torch.cuda.default_stream().cuda_stream


def test_the_snapshot_on_the_gpu_is_of_the_moment_it_was_taken(tmp_path, model_folder):
    """The learner's next step changes the weights at once; what was announced is what they were."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).to("cuda:0")
    announced: queue.SimpleQueue[WeightsAvailable] = queue.SimpleQueue()
    publisher = Publisher(BroadcastConfig(medium=CUDAIPCMedium()), tmp_path, announced.put, SystemClock())
    for version in (1, 2, 3):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        publisher.publish(version, dict(model.named_parameters()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_().add_(version)
        announced.get(timeout=TIMEOUT_S)
        views = view_tensors(publisher._flats[(version - 1) % 2], publisher._manifest)
        assert all(torch.equal(views[name], before[name]) for name in views)
    publisher.close()
