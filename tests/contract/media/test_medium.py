"""The weight-medium contract, over every medium, with a second process at the other end."""

import asyncio
import contextlib
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import zmq

from asyncrl.config.broadcast import BroadcastConfig, DeltaConfig, FilesMedium, ZeroMQMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import view_tensors
from asyncrl.schema.weights import Probe, WeightsAvailable
from asyncrl.transport.security import ClientKeys, load_client_keys, make_keys
from asyncrl.weights.media.base import VersionUnavailableError
from asyncrl.weights.media.registry import open_reader
from asyncrl.weights.media.shared_memory import HEADER_BYTES, SharedMemoryReader
from asyncrl.weights.media.zeromq import FeederRequest, PartRequest
from asyncrl.weights.media.zeromq_reader import ZeroMQReader
from asyncrl.weights.shm_segments import folders_of_run, remove_leftover_segments
from asyncrl.weights.sockets import ask, open_dealer
from asyncrl.weights.subscriber import Subscriber
from tests.builders import outcome_of
from tests.contract.line_process import LineProcess, LineProcesses
from tests.contract.media.learners import MEDIA, NUM_VALUES, Learner, tensors_of
from tests.contract.media.peers import Fetched, Order

PEER = "tests.contract.media.peers"
TIMEOUT_S = 30
SHARDS = {f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)} | {"model.safetensors.index.json"}


@pytest.fixture(params=MEDIA)
def config(request) -> BroadcastConfig:
    return BroadcastConfig(medium=MEDIA[request.param])


ONLY = {name: pytest.mark.parametrize("config", [BroadcastConfig(medium=medium)], ids=[name]) for name, medium in MEDIA.items()}
"""A test over one medium alone."""


@pytest.fixture
def learner(config, tmp_path) -> Iterator[Learner]:
    with contextlib.closing(Learner(config, tmp_path)) as learner:
        yield learner


@pytest.fixture
def subscriber(config, tmp_path) -> Iterator[Subscriber]:
    with contextlib.closing(Subscriber(config, tmp_path)) as subscriber:
        yield subscriber


@pytest.fixture(scope="module")
def processes() -> Iterator[LineProcesses]:
    with contextlib.closing(LineProcesses(PEER, "subscribe")) as processes:
        yield processes


@pytest.fixture
def told_to_fetch(processes, config, tmp_path) -> Callable[[WeightsAvailable], LineProcess]:
    """Has a long-lived subscriber process fetch a version, and returns it."""

    def tell(available: WeightsAvailable) -> LineProcess:
        (generator,) = processes.take(1)
        generator.tell(Order(config, str(tmp_path), available))
        return generator

    return tell


@contextlib.contextmanager
def publisher_process(config, run_folder: Path, num_values: int, num_versions: int) -> Iterator[LineProcess]:
    """A learner of its own that publishes as fast as it can; it is killed in the end."""
    told = msgspec.json.encode(config).decode(), str(run_folder), str(num_values), str(num_versions)
    peer = LineProcess(PEER, "publish", *told)
    try:
        yield peer
    finally:
        peer.kill()
        peer.close()


async def test_what_arrives_is_bit_identical_whatever_the_dtypes(config, learner, subscriber):
    tensors = {
        "embed": torch.randn(313, 7).to(torch.bfloat16),
        "norm": torch.tensor([float("inf"), -0.0, 1e-45]),
        "count": torch.arange(5),
        "nothing": torch.zeros(0, 3),
    }
    probe = Probe(b"\x01\x00\x00\x00", b"")
    available = learner.publish(7, tensors, probe)
    assert (available.version, available.probe, available.medium) == (7, probe, config.medium.__struct_config__.tag)
    arrived = await subscriber.fetch(available)
    assert_bit_identical(arrived, tensors)
    assert all(arrived[name].dtype == tensor.dtype for name, tensor in tensors.items())


async def test_a_racing_publisher_never_yields_a_mixture_and_what_it_leaves_when_killed_is_removed(config, tmp_path, subscriber):
    """The publisher goes as fast as it can; whatever is fetched is one version, or an error that says so, after its end too."""
    whole = 0
    with publisher_process(config, tmp_path, 400_000, 1_000_000) as peer:
        while whole < 3:
            available = await asyncio.to_thread(peer.hear_newest, WeightsAvailable)
            with contextlib.suppress(BroadcastError):
                tensors = await subscriber.fetch(available)
                found = {float(value) for tensor in tensors.values() for value in tensor.unique()}
                tensors.check()
                assert found == {float(available.version)}
                whole += 1
        subscriber.close()
        available = peer.hear(WeightsAvailable)
        peer.kill()
        while (later := peer.hear(WeightsAvailable)) is not None:
            available = later
    whole_or_error = read(config, tmp_path, available, stalled_after_s=0.5)
    assert whole_or_error in ({float(available.version)}, set())
    learner = Learner(config, tmp_path)
    for version in (1, 2, 3):
        assert read(config, tmp_path, learner.publish(version)) == {float(version)}
    learner.close()
    kept = {f"version-0000000{version}/{name}" for version in (2, 3) for name in SHARDS}
    assert left_behind(tmp_path) == (kept if isinstance(config.medium, FilesMedium) else set())


def test_a_version_long_gone_is_a_clear_error_and_the_newest_still_comes(learner, told_to_fetch):
    first = learner.publish(1)
    for version in (2, 3, 4):
        newest = learner.publish(version)
    assert "version 1" in told_to_fetch(first).hear(Fetched).error
    assert told_to_fetch(newest).hear(Fetched) == Fetched(4, [4.0])


def test_a_subscriber_killed_in_the_middle_disturbs_nobody(learner, told_to_fetch):
    told_to_fetch(learner.publish(1, tensors_of(1, 2_000_000))).kill()
    for version in (2, 3, 4):
        available = learner.publish(version, tensors_of(version, 2_000_000))
    assert told_to_fetch(available).hear(Fetched) == Fetched(4, [4.0])


def test_a_stopped_subscriber_does_not_hold_the_publisher_up(learner, told_to_fetch):
    assert told_to_fetch(learner.publish(1)).hear(Fetched).error == ""
    peer = told_to_fetch(learner.publish(2))
    peer.process.send_signal(signal.SIGSTOP)
    try:
        for version in range(3, 23):
            available = learner.publish(version)
    finally:
        peer.process.send_signal(signal.SIGCONT)
    assert peer.hear(Fetched).version == 2
    assert told_to_fetch(available).hear(Fetched) == Fetched(22, [22.0])


def read(config: BroadcastConfig, run_folder: Path, available: WeightsAvailable, stalled_after_s: float = 20.0) -> set[float]:
    """Return the distinct values that one fetch yields, none where it fails as promised."""
    if isinstance(config.medium, ZeroMQMedium):
        reader = ZeroMQReader(config.medium, stalled_after_s=stalled_after_s)
    else:
        reader = open_reader(config.medium, run_folder)
    into = torch.zeros(available.manifest.total_bytes, dtype=torch.uint8)
    try:
        found = reader.fetch(available, into.numpy().data, threading.Event())
    except BroadcastError:
        return set()
    finally:
        reader.close()
    assert found == available.bucket_fingerprints or not available.bucket_fingerprints
    return {float(value) for tensor in view_tensors(into, available.manifest).values() for value in tensor.unique()}


def left_behind(run_folder: Path) -> set[str]:
    weights, ours = run_folder / "weights", folders_of_run(run_folder)
    shared = {str(path.relative_to(ours.parent)) for path in ours.parent.glob(f"{ours.name}*/*")}
    return {str(path.relative_to(weights)) for path in weights.rglob("*") if path.is_file()} | shared


@pytest.mark.parametrize("config", [BroadcastConfig(medium=medium, verify=True) for medium in MEDIA.values()], ids=MEDIA)
async def test_a_flipped_byte_never_goes_live_and_the_version_comes_once_the_bytes_are_right(learner, subscriber):
    await subscriber.fetch(learner.publish(1))
    second = learner.publish(2)
    with flipped_byte(learner, second), pytest.raises(BroadcastError, match="arrived damaged"):
        await subscriber.fetch(second)
    repaired = await subscriber.fetch(second)
    assert_bit_identical(repaired, tensors_of(2))


@contextlib.contextmanager
def flipped_byte(learner: Learner, available: WeightsAvailable) -> Iterator[None]:
    """Damage one byte of a committed version where it lies; put it right afterwards."""
    if available.medium in {"zeromq", "gloo"}:
        target = next(flat for flat in learner.publisher._flats if flat.view(torch.float32)[0] == available.version)
        target[1000] ^= 1
        yield
        target[1000] ^= 1
        return
    path, offset = Path(available.location), 2000
    if path.is_dir():
        path = next(path.glob("*-of-*.safetensors"))
    if available.medium == "shared_memory":
        offset = HEADER_BYTES + (path.stat().st_size - HEADER_BYTES) // 2 + 1000
    flip(path, offset)
    yield
    flip(path, offset)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


async def test_a_cancelled_fetch_leaves_the_subscriber_usable(learner, subscriber):
    async with asyncio.TaskGroup() as tasks:
        fetching = tasks.create_task(subscriber.fetch(learner.publish(1)))
        await asyncio.sleep(0)
        fetching.cancel()
    assert_bit_identical(await subscriber.fetch(learner.publish(2)), tensors_of(2))


async def test_closing_while_a_version_is_fetched_ends_the_fetch(config, learner, subscriber):
    """It comes from a learner that is no more."""
    available = learner.publish(1)
    learner.close()
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(outcome_of(subscriber.fetch(available)))
        await asyncio.sleep(0)
        await asyncio.to_thread(subscriber.close)
    assert isinstance(waiting.result(), BroadcastError) or isinstance(config.medium, FilesMedium)


@ONLY["shared_memory"]
async def test_another_medium_or_run_is_refused_and_the_same_version_can_be_had_again(config, tmp_path, learner, subscriber):
    available = learner.publish(4)
    for _ in range(2):
        assert_bit_identical(await subscriber.fetch(available), tensors_of(4))
    with pytest.raises(BroadcastError, match="carrier_pigeon"):
        await subscriber.fetch(msgspec.structs.replace(available, version=5, medium="carrier_pigeon"))
    another = Learner(config, tmp_path / "another")
    with pytest.raises(BroadcastError, match="not a shared-memory segment of this run"):
        await subscriber.fetch(another.publish(1))
    another.close()
    assert remove_leftover_segments(tmp_path / "another") == []


# -- what one medium alone must hold ---------------------------------------------------------------------------------------


@ONLY["files"]
def test_a_full_disk_is_told_to_the_learner_at_the_next_publish(tmp_path, learner):
    """No file may become larger than some: the write stops half-way, as on a disk without room."""
    learner.publish(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (NUM_VALUES, hard))
    try:
        publisher = learner.publisher
        publisher.publish(2, tensors_of(2))
        with publisher._changed:
            assert publisher._changed.wait_for(lambda: publisher._failure, TIMEOUT_S)
        with pytest.raises(BroadcastError, match=r"version 2 was not published: .* could not be written to .*: File too large"):
            publisher.publish(3, tensors_of(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version-00000001"]
    assert learner.publish(3).version == 3


def test_a_learner_that_lives_keeps_its_shared_memory_whoever_starts_under_the_same_path(tmp_path):
    """As in a container that shares /dev/shm and not the files; once it is killed, the next start removes what it left."""
    config = BroadcastConfig(dtype="bfloat16", delta=DeltaConfig())
    with publisher_process(config, tmp_path, 10_000, 2) as other:
        first, second = other.hear(WeightsAvailable), other.hear(WeightsAvailable)
        its_files = left_behind(tmp_path)
        assert any("delta-" in name for name in its_files)
        learner = Learner(config, tmp_path)
        assert read(config, tmp_path, learner.publish(1)) == {1.0}
        assert its_files < left_behind(tmp_path)
        learner.close()
        assert left_behind(tmp_path) == its_files
        assert remove_leftover_segments(tmp_path) == []
        assert (read(config, tmp_path, first), read(config, tmp_path, second)) == ({1.0}, {2.0})
    assert len(remove_leftover_segments(tmp_path)) == 1
    assert left_behind(tmp_path) == set()


@ONLY["zeromq"]
async def test_weights_over_zeromq_come_through_with_the_keys_of_the_run_only(config, tmp_path):
    """From the learner, and from a generator that passes them on."""
    make_keys(tmp_path)
    right, stranger = load_client_keys(tmp_path), ClientKeys(*(part.decode() for part in zmq.curve_keypair()), "")
    learner, welcome = Learner(config, tmp_path), Subscriber(config, tmp_path)
    available = learner.publish(1)
    assert_bit_identical(await welcome.fetch(available), tensors_of(1))
    for location in (available.location, welcome._reader.server.location):
        for keys in (right, None, stranger):
            with zmq.Context() as context, open_dealer(context, location, keys) as dealer:
                ask(dealer, PartRequest(1, available.fingerprint, 0, 1024))
                assert bool(dealer.poll(TIMEOUT_S * 1000 if keys is right else 500)) == (keys is right)
    refused = ZeroMQReader(config.medium, stranger, stalled_after_s=0.5)
    into = memoryview(bytearray(available.manifest.total_bytes))
    with pytest.raises(BroadcastError, match="do the keys match"):
        await asyncio.to_thread(refused.fetch, available, into, threading.Event())
    for end in (refused, welcome, learner):
        end.close()


@ONLY["zeromq"]
async def test_a_slow_generator_is_not_starved_by_a_fast_learner(learner, monkeypatch):
    """While it says that it fetches version 1, newer ones take turns in the other slot."""
    monkeypatch.setattr("asyncrl.weights.media.zeromq.SILENT_AFTER_S", 100.0)
    available = learner.publish(1)
    with zmq.Context() as context, open_dealer(context, available.location, None) as dealer:
        for version in range(2, 8):
            for request in (FeederRequest(1, available.fingerprint, "slow"), PartRequest(1, available.fingerprint, 0, 1024)):
                ask(dealer, request)
                assert await asyncio.to_thread(dealer.poll, TIMEOUT_S * 1000)
                header, *parts = dealer.recv_multipart()
                assert not msgspec.msgpack.decode(header).get("gone")
            assert np.frombuffer(parts[0], np.float32)[0] == 1.0
            learner.publish(version)


CARRIERS = {
    name: BroadcastConfig(medium=medium, bucket_bytes=1 << 14, delta=DeltaConfig(full_every=6))
    for name, medium in MEDIA.items()
    if medium.carries_deltas
}
DELTAS = pytest.mark.parametrize("config", CARRIERS.values(), ids=CARRIERS)


def assert_bit_identical(arrived: Mapping[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(arrived[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


@DELTAS
async def test_deltas_are_bit_identical_for_the_steady_the_slow_and_the_late(config, tmp_path, learner, subscriber):
    """Tensors of any bytes and damaged deltas are in tests/properties/test_delta_bytes.py."""
    tensors, num_deltas = tensors_of(0), 0
    slow, late = Subscriber(config, tmp_path), Subscriber(config, tmp_path)
    for version in range(20):
        available = learner.publish(version, tensors)
        num_deltas += bool(available.deltas) and available.deltas[-1].version == version
        assert sum(delta.num_bytes for delta in available.deltas) <= available.manifest.total_bytes
        assert_bit_identical(await subscriber.fetch(available), tensors)
        if version % 7 == 0:
            assert_bit_identical(await slow.fetch(available), tensors)
        if version == 17:
            assert_bit_identical(await late.fetch(available), tensors)
        for tensor in tensors.values():
            tensor[version::1000] = float(version + 1)
    assert num_deltas == 19
    slow.close()
    late.close()


@DELTAS
def test_deltas_are_removed_when_no_longer_offered_and_those_of_a_killed_learner_by_the_next(config, tmp_path):
    with publisher_process(config, tmp_path, 1000, 9) as peer:
        while peer.hear(WeightsAvailable).version < 9:
            pass
    learner = Learner(config, tmp_path)
    for version in range(20):
        newest = learner.publish(version)
        blobs = {name for name in left_behind(tmp_path) if "delta-" in name}
        assert len(blobs) == (0 if isinstance(config.medium, ZeroMQMedium) else len(newest.deltas))
    learner.close()
    assert isinstance(config.medium, FilesMedium) or not left_behind(tmp_path)


@ONLY["shared_memory"]
def test_a_torn_read_is_always_noticed_by_the_sequence_number_alone(config, tmp_path):
    """The learner overwrites the slot as often as it can, because no lock spares it; there is no fingerprint to compare."""
    reader, whole, torn = SharedMemoryReader(tmp_path), 0, 0
    into = np.zeros(0, np.float32)
    with publisher_process(config, tmp_path, 400_000, 1_000_000) as peer:
        while whole < 50 or torn < 50:
            available = peer.hear_newest(WeightsAvailable)
            try:
                lease = reader.lease(available)
            except VersionUnavailableError:
                continue
            lease.release()
            source = lease.flat.numpy().view(np.float32)
            into = into if into.size else np.zeros_like(source)
            with contextlib.suppress(VersionUnavailableError):
                while True:
                    torn += 1
                    np.copyto(into, source)
                    lease.check()
                    assert into.min() == into.max() == available.version
                    torn, whole = torn - 1, whole + 1
    reader.close()
    remove_leftover_segments(tmp_path)


@ONLY["shared_memory"]
async def test_a_lent_version_that_the_learner_had_to_overwrite_is_noticed_and_it_did_not_wait(config, tmp_path, learner):
    """Both slots are being read; the third version goes over the older one, whose reader finds out before it samples."""
    readers = [Subscriber(config, tmp_path) for _ in range(3)]
    first = await readers[0].fetch(learner.publish(1))
    second = await readers[1].fetch(learner.publish(2))
    first.check()
    third = await readers[2].fetch(learner.publish(3))
    with pytest.raises(BroadcastError, match="overwritten while it was read"):
        first.check()
    second.check()
    assert_bit_identical(third, tensors_of(3))
    for reader in readers:
        reader.close()


@ONLY["shared_memory"]
async def test_a_fetch_cancelled_when_it_was_all_but_done_holds_no_slot(learner, subscriber):
    async with asyncio.TaskGroup() as tasks:
        fetching = tasks.create_task(subscriber.fetch(learner.publish(1)))
        await asyncio.sleep(0)
        subscriber._executor.submit(lambda: None).result(TIMEOUT_S)  # the fetch is over, and the loop has not heard of it
        fetching.cancel()
    assert fetching.cancelled()
    assert learner.publisher._writer.busy_slots() == frozenset()
    assert (await subscriber.fetch(learner.publish(2)))["layer.0"][0] == 2.0


def test_the_learner_may_change_its_weights_as_soon_as_publish_returns(config, tmp_path, learner):
    tensors = tensors_of(1)
    learner.publisher.publish(1, tensors)
    for tensor in tensors.values():
        tensor.fill_(99.0)
    assert read(config, tmp_path, learner.announced.get(timeout=TIMEOUT_S)) == {1.0}
