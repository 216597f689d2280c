"""The generator process over an in-process channel: the test is the controller."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from asyncrl.clock import SystemClock
from asyncrl.config.generate import FakeEngineConfig, GenerateConfig, TransformersEngineConfig
from asyncrl.config.run import PlacementConfig, RunConfig, SupervisionConfig, TransportConfig
from asyncrl.control.edge import odd_value
from asyncrl.errors import BroadcastError, GenerationError
from asyncrl.generate.worker import GeneratorWorker
from asyncrl.models.layout import make_manifest
from asyncrl.schema import samples
from asyncrl.schema.control import AbortGroup, EngineReady, EngineRoom, Heartbeat, LoadModel, PhaseReached, SetPhase
from asyncrl.schema.weights import Probe, VersionLive, WeightsAvailable, WeightsManifest
from asyncrl.weights.tensors import MappedTensors, SharedTensors
from tests.builders import Controller, until, working
from tests.contract.engine_cases import make_model, reference_logprobs, tensors_of

FAKE = FakeEngineConfig(num_slots=8, max_sequence_tokens=64, token_latency_s=0.0, length_distribution="fixed", mean_tokens=5)
ENDLESS = FakeEngineConfig(num_slots=8, max_sequence_tokens=64, token_latency_s=1000.0)
SLOW = FakeEngineConfig(num_slots=8, max_sequence_tokens=64, token_latency_s=0.02, length_distribution="fixed", mean_tokens=10)
SLOWER = FakeEngineConfig(num_slots=8, max_sequence_tokens=64, token_latency_s=0.1, length_distribution="fixed", mean_tokens=8)


class Observer(Controller):
    """The test's end of the connection."""

    ready: EngineReady

    async def sees_requests_running(self) -> None:
        await self.report(Heartbeat, lambda beat: beat.gauges["process/requests_running"] > 0)

    async def results(self, num: int) -> list[samples.Sample | samples.SampleFailure]:
        return sorted(await self.answers(num), key=lambda result: (result.group_id, result.index))


def noting(versions):
    """Return a fetch that brings nothing and notes which versions it was asked for."""

    async def fetch(announced):
        versions.append(announced.version)
        return {}

    return fetch


NOTHING = noting([])


@asynccontextmanager
async def generator(engine=FAKE, fetch=NOTHING, folder="model", run_folder=Path(), kind="disaggregated", **generate):
    """A generator that has loaded its model."""
    supervision, own = SupervisionConfig(heartbeat_s=0.02), GenerateConfig(engine=engine, **generate)
    config = RunConfig(generate=own, supervision=supervision, placement=PlacementConfig(kind=kind))

    def generate(near, _):
        return GeneratorWorker(config, run_folder, near, SystemClock(), fetch, "generator-7").run()

    async with working("generator", "generator-7", generate, Observer) as controller:
        await controller.order(LoadModel(str(folder)))
        controller.ready = await controller.report(EngineReady)
        yield controller


def work(group_id=1, prompt=None, members=3, max_new_tokens=20) -> samples.GroupWork:
    prompt, sampling = prompt or samples.Prompt("p", text="abc"), samples.SamplingParams(max_new_tokens=max_new_tokens)
    return samples.GroupWork(group_id, 1, prompt, tuple(range(members)), sampling, seed=9)


def available(version: int, probe: Probe | None = None) -> WeightsAvailable:
    return WeightsAvailable(version, "shared_memory", "somewhere", WeightsManifest((), 1), "", 0.0, probe=probe)


async def test_the_controller_is_told_when_the_engine_has_more_or_less_room() -> None:
    engine = FakeEngineConfig(num_slots=64, max_sequence_tokens=64, token_latency_s=1000.0, kv_blocks=16)
    async with generator(engine) as controller:
        assert controller.ready.num_slots == 4  # 16 blocks, and 4 for the longest sequence
        await controller.connection.send(work(members=3))
        assert (await controller.report(EngineRoom)).num_slots == 5  # three prompts hold a block each and keep one to grow into
        await controller.order(AbortGroup(1))
        assert (await controller.report(EngineRoom)) == EngineRoom("generator-7", 4)


async def test_the_model_folder_in_the_log_is_the_one_that_is_used(caplog) -> None:
    caplog.set_level("INFO", "asyncrl")
    async with generator(folder="/learners", model_folder="/mine"):
        assert "engine ready with 8 slots, model from /mine" in caplog.messages


async def test_versions_in_between_are_skipped() -> None:
    fetched = []
    go_on = asyncio.Event()

    async def fetch(announced):
        fetched.append(announced.version)
        await go_on.wait()
        return {}

    async with generator(fetch=fetch) as controller:
        for version in range(5):
            await controller.order(available(version))
        assert await controller.connection.flush(10)
        go_on.set()
        await controller.report(VersionLive, lambda live: live.version == 4)
        assert fetched[-1] == 4
        assert len(fetched) <= 2


async def test_a_version_that_could_not_be_fetched_is_tried_again_though_no_other_comes() -> None:
    """The learner may be waiting for samples of this very one."""
    fetched = []

    async def fetch(announced):
        fetched.append(announced.version)
        if len(fetched) == 1:
            raise BroadcastError("the network is down")
        return {}

    async with generator(fetch=fetch) as controller:
        await controller.order(available(1))
        assert (await controller.report(VersionLive)).version == 1
    assert fetched == [1, 1]


async def test_without_in_flight_updates_a_running_group_keeps_one_version() -> None:
    async with generator(SLOWER, noting(asked := []), in_flight_updates=False) as controller:
        await controller.order(available(0))
        await controller.report(VersionLive)
        await controller.connection.send(work(1))
        await controller.sees_requests_running()
        await controller.order(available(1))
        await until(lambda: 1 in asked)
        assert await controller.connection.flush(0) is False
        await controller.connection.send(work(2))
        results = await controller.results(6)
        assert [set(samples.ids_from_bytes(s.versions).tolist()) for s in results] == [{0}] * 3 + [{1}] * 3


async def test_without_in_flight_updates_what_is_newest_when_the_running_groups_are_done_is_loaded() -> None:
    async with generator(ENDLESS, noting(asked := []), in_flight_updates=False) as controller:
        await controller.connection.send(work(1))
        await controller.sees_requests_running()
        await controller.order(available(1))
        await until(lambda: asked)
        for order in (available(2), available(3), AbortGroup(1)):
            await controller.order(order)
        assert (await controller.report(VersionLive)).version == 3
        assert asked == [1, 3]


@pytest.mark.parametrize("in_flight_updates", [False, True])
async def test_after_a_load_that_broke_off_a_generator_says_so_and_does_nothing_until_one_succeeds(
    folder, in_flight_updates
) -> None:
    """The next one may have a lower number: of a learner back from a checkpoint. No group begins that must keep one version.

    Where a load may have waited, what it lends is checked before the load, too.
    """

    def check(version) -> None:
        loaded.append(version)
        if version == 6 and (in_flight_updates or loaded.count(6) > 1):
            raise BroadcastError("overwritten")

    async def fetch(announced):
        flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
        return MappedTensors(manifest, flat, check=partial(check, announced.version))

    loaded = []
    manifest = make_manifest(tensors_of(make_model(0, hidden_size=8, num_hidden_layers=1)))
    prompt = samples.Prompt("p", token_ids=samples.ids_to_bytes([2, 3, 4]))
    async with asyncio.timeout(30), generator(REAL, fetch, folder, in_flight_updates=in_flight_updates) as controller:
        await controller.order(available(5))
        await controller.report(VersionLive)
        await controller.order(available(6))
        await until(lambda: 6 in loaded)
        await controller.connection.send(work(1, prompt))
        running, beats = 3.0 if in_flight_updates else 0.0, list[Heartbeat]()
        for _ in range(3):
            beats.append(await controller.report(Heartbeat, lambda beat: beat.gauges["process/requests_running"] == running))
        assert beats[-1].waiting_for == "a version that comes whole"
        assert beats[-1].gauges["process/busy_s"] == beats[-2].gauges["process/busy_s"]
        await controller.order(available(3))
        assert (await controller.report(VersionLive)).version == 3
        await controller.results(3)


async def test_what_has_tokens_begins_again_before_weights_of_a_lower_version(tmp_path) -> None:
    """Of a learner back from a checkpoint, which a generator without weights takes: versions never decrease within a sample."""
    engine = msgspec.structs.replace(SLOWER, mean_tokens=40)
    async with generator(engine, run_folder=tmp_path, kind="colocated") as controller:
        version, num_tokens = 4, 0.0
        await controller.connection.send(work(max_new_tokens=40))
        while num_tokens == 0:
            version += 1
            await controller.order(available(version))
            await controller.report(VersionLive)
            num_tokens = (await controller.report(Heartbeat)).gauges["process/tokens_generated"]
        await controller.order(SetPhase("train", 1))
        await controller.order(available(3))
        await controller.order(SetPhase("rollout", 2))
        for sample in await controller.results(3):
            assert samples.ids_from_bytes(sample.versions).tolist() == [3] * 40


async def test_a_group_whose_abort_overtook_it_is_not_begun() -> None:
    async with generator(ENDLESS) as controller:
        await controller.order(AbortGroup(1))
        assert await controller.connection.flush(10)
        await controller.connection.send(work())
        assert {failure.reason for failure in await controller.results(3)} == {"aborted before it began"}
        assert await controller.connection.flush(10)


async def test_a_group_that_is_aborted_while_it_waits_for_a_swap_is_not_begun() -> None:
    async with generator(ENDLESS, noting(asked := []), in_flight_updates=False) as controller:
        await controller.connection.send(work(1))
        await controller.sees_requests_running()
        await controller.order(available(1))
        await until(lambda: asked)
        await controller.connection.send(work(2))
        for finished in range(3, 3 + 2 * TransportConfig().window):  # so many orders that group 2 is there when its own comes
            await controller.order(AbortGroup(finished))
        await controller.order(AbortGroup(2))
        await controller.order(AbortGroup(1))
        reasons = {failure.group_id: failure.reason for failure in await controller.results(6)}
        assert reasons == {1: "aborted after 0 tokens", 2: "aborted before it began"}


@pytest.mark.parametrize("is_running", [True, False])
async def test_an_evaluation_group_of_the_same_number_is_not_aborted(is_running) -> None:
    async with generator(SLOW) as controller:
        if not is_running:
            await controller.order(AbortGroup(1))
            assert await controller.connection.flush(10)
        await controller.connection.send(msgspec.structs.replace(work(), purpose="eval"))
        if is_running:
            await controller.sees_requests_running()
            await controller.order(AbortGroup(1))
        assert all(isinstance(result, samples.Sample) for result in await controller.results(3))


async def test_on_a_shared_device_it_takes_weights_as_it_wakes_and_those_that_changed_meanwhile_are_an_error(tmp_path) -> None:
    """What it holds and when, in a run: tests/integration/placement/test_placement.py."""

    def check() -> None:
        raise BroadcastError("the learner has made version 2")

    async def fetch(announced):
        fetched.append(announced.version)
        manifest = make_manifest({"weight": torch.zeros(16)})
        return {} if len(fetched) == 1 else SharedTensors(manifest, torch.zeros(64, dtype=torch.uint8), check=check)

    fetched = []
    async with generator(fetch=fetch, run_folder=tmp_path, kind="colocated") as controller:
        await controller.order(available(0))
        await controller.report(VersionLive)
        for phase, number in (("train", 1), ("inference", 2), ("rollout", 3)):
            await controller.order(SetPhase(phase, number))
            reached = await controller.report(PhaseReached, lambda told, number=number: told.number == number)
            assert reached.phase == phase
            assert fetched == ([0, 0] if phase == "rollout" else [0])
        await controller.order(SetPhase("train", 4))
        error = await asyncio.wait_for(controller.task, 30)
    assert isinstance(error, BroadcastError)
    assert "version 2" in str(error)


REAL = TransformersEngineConfig(num_slots=4, max_sequence_tokens=32)


def probe_of(model) -> Probe:
    ids = list(range(2, 12))
    return Probe(samples.ids_to_bytes(ids), samples.logprobs_to_bytes(reference_logprobs(model, (2,), ids[1:])))


@pytest.mark.parametrize("position", [0, -1])
async def test_a_probe_that_is_not_finite_is_a_large_error_which_the_controller_takes(folder, position) -> None:
    model = make_model(1, hidden_size=8, num_hidden_layers=1)
    probe = probe_of(model)
    logprobs = samples.logprobs_from_bytes(probe.logprobs).tolist()
    logprobs[position] = float("nan")

    async def fetch(announced):
        return model.state_dict()

    async with generator(REAL, fetch, folder) as controller:
        await controller.order(available(0, msgspec.structs.replace(probe, logprobs=samples.logprobs_to_bytes(logprobs))))
        live = await controller.report(VersionLive)
    assert live.probe_error > 1e6
    assert not odd_value(live)


async def test_the_probe_agrees_after_a_swap_and_tells_wrong_weights_and_those_that_do_not_fit_end_the_generator(folder) -> None:
    right, wrong = (make_model(seed, hidden_size=8, num_hidden_layers=1) for seed in (1, 2))

    async def fetch(announced):
        return right.state_dict() if announced.version < 2 else {}

    async with generator(REAL, fetch, folder) as controller:
        await controller.order(available(0, probe_of(right)))
        assert 0 <= (await controller.report(VersionLive)).probe_error < 1e-5
        await controller.order(available(1, probe_of(wrong)))
        assert (await controller.report(VersionLive)).probe_error > 0.1
        await controller.order(available(2))
        error = await asyncio.wait_for(controller.task, 30)
    assert isinstance(error, GenerationError)
    assert "new weights lack" in str(error)
