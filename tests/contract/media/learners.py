"""Learners that tests play: one that publishes as a run's does, and one that has the bare writer of a medium."""

import queue
from collections.abc import Mapping
from pathlib import Path

import torch

from asyncrl.clock import SystemClock
from asyncrl.config.broadcast import BroadcastConfig, FilesMedium, GlooMedium, SharedMemoryMedium, ZeroMQMedium
from asyncrl.models.layout import bucket_ends, view_tensors
from asyncrl.schema.weights import Probe, WeightsAvailable, WeightsManifest
from asyncrl.weights.buckets import device_fingerprints, fingerprints_of, version_fingerprint
from asyncrl.weights.media.collective import CollectiveWriter
from asyncrl.weights.media.zeromq import ZeroMQWriter
from asyncrl.weights.publisher import Publisher

CPU = torch.device("cpu")
NUM_VALUES = 100_000
TIMEOUT_S = 60
MEDIA = {
    "shared_memory": SharedMemoryMedium(),
    "files": FilesMedium(keep_last=2, shard_bytes=500_000),
    "zeromq": ZeroMQMedium(chunk_bytes=64 << 10),
    "gloo": GlooMedium(timeout_s=20.0, gather_s=0.05),
}
"""Those that run here."""


def tensors_of(version: int, num_values: int = NUM_VALUES, num_tensors: int = 4) -> dict[str, torch.Tensor]:
    """Tensors that are all `version`, so that a mixture shows."""
    return {f"layer.{index}": torch.full((num_values,), float(version)) for index in range(num_tensors)}


class Learner:
    """A publisher and what it announced."""

    def __init__(self, config: BroadcastConfig, run_folder: Path) -> None:
        self.announced: queue.SimpleQueue[WeightsAvailable] = queue.SimpleQueue()
        self.publisher = Publisher(config, run_folder, self.announced.put, SystemClock())
        self.close = self.publisher.close

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor] | None = None, probe: Probe | None = None
    ) -> WeightsAvailable:
        """Publish these, or `tensors_of` the version, and wait for the announcement."""
        self.publisher.publish(version, tensors_of(version) if tensors is None else tensors, probe)
        return self.announced.get(timeout=TIMEOUT_S)


class SlotLearner:
    """A writer and the two slots that a publisher would fill by turns."""

    def __init__(self, writer: CollectiveWriter | ZeroMQWriter, manifest: WeightsManifest) -> None:
        self.writer = writer
        self._manifest, self._slots = manifest, writer.open(manifest)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor] | None = None) -> WeightsAvailable:
        """Publish these, or a model that is all `version`."""
        slot, ends = self._slots[version % 2], bucket_ends(self._manifest)
        self.writer.overwrite(version % 2)
        for name, view in view_tensors(slot, self._manifest).items():
            view.fill_(version) if tensors is None else view.copy_(tensors[name])
        is_collective = isinstance(self.writer, CollectiveWriter)
        found = device_fingerprints(slot, ends, CPU) if is_collective else fingerprints_of(slot.numpy().data, ends)
        name = version_fingerprint(found)
        location = self.writer.commit(version % 2, version, name)
        medium = "nccl" if is_collective else "zeromq"
        return WeightsAvailable(version, medium, location, self._manifest, name, 0.0, bucket_fingerprints=found)
