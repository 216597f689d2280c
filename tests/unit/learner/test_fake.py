"""The learner without a model keeps the other's promises: order, checkpoints, resume, the end."""

import asyncio
import contextlib
import subprocess
import sys

import pytest

from asyncrl.clock import SystemClock
from asyncrl.config.load import parse_config
from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learner.fake import run_fake_learner
from asyncrl.schema.batches import StepDone
from asyncrl.schema.control import Checkpoint, CheckpointDone, LearnerReady, PhaseReached, SetPhase, Shutdown
from tests.builders import channel_of, outcome_of
from tests.unit.learner.test_worker import TIMEOUT_S, Publisher

FAKE = {"learner": {"fake_step_s": 0.01}, "generate": {"engine": {"kind": "fake"}}, "supervision": {"heartbeat_s": 0.02}}


@contextlib.asynccontextmanager
async def learner(run_folder, **settings):
    async with channel_of("learner", "learner") as (near, far), asyncio.TaskGroup() as group:
        controller, versions = Publisher(far), []
        controller.versions = versions
        running = run_fake_learner(parse_config(FAKE | settings), run_folder, near, SystemClock(), versions.append)
        controller.task = group.create_task(outcome_of(running))
        yield controller
        if not controller.task.done():
            await controller.order(Shutdown())
            assert await controller.ended() is None


async def test_steps_make_versions_and_the_next_learner_goes_on_from_the_newest_whole_checkpoint(kit, tmp_path):
    checkpoints, settings = tmp_path / "checkpoints", {"checkpoint": {"every_steps": 2, "keep_last": 9}}
    async with learner(tmp_path, **settings) as controller:
        assert (await controller.news(LearnerReady)).version == 0
        for step in range(5):
            await controller.connection.send(kit.batch(kit.samples(seed=step), step=step))
        await controller.order(Checkpoint(5, controller_json="mine"))
        news = [await controller.news(StepDone | CheckpointDone) for _ in range(8)]
        assert [told.version for told in news if isinstance(told, StepDone)] == [1, 2, 3, 4, 5]
        done = news[0]
        assert done.finished_s - done.started_s >= 0.01
        assert done.metrics["reward/min"] <= done.metrics["reward/mean"] <= done.metrics["reward/max"]
        assert await controller.connection.flush(TIMEOUT_S)
        again = [await controller.step(kit.batch(kit.samples(), step=4)) for _ in range(2)]
        assert [(told.step, told.version) for told in again] == [(4, 5)] * 2
        assert [(one.version, one.manifest.total_bytes) for one in controller.versions] == [(version, 0) for version in range(6)]
    names = ["step-000002", "step-000004", "step-000005"]
    assert sorted(path.name for path in checkpoints.iterdir()) == names
    assert "mine" in (checkpoints / names[-1] / "trainer" / "state.json").read_text()
    (checkpoints / names[-1] / "trainer" / "state.json").write_text("{}")
    async with learner(tmp_path, **settings) as controller:
        ready = await controller.news(LearnerReady)
        assert (ready.version, ready.checkpoint) == (4, str(checkpoints / "step-000004"))


async def test_a_step_out_of_order_ends_it_and_a_phase_is_reached_at_once(kit, tmp_path):
    async with learner(tmp_path) as controller:
        await controller.news(LearnerReady)
        await controller.order(SetPhase("rollout", 3))
        assert (await controller.news(PhaseReached)).number == 3
        await controller.connection.send(kit.batch(kit.samples(), step=2))
        error = await controller.ended()
    assert isinstance(error, LearnerError)
    assert "step 2 came while the learner is at version 0" in str(error)


async def test_the_end_waits_for_the_step_in_hand(kit, tmp_path):
    async with learner(tmp_path, learner={"fake_step_s": 0.3}) as controller:
        await controller.news(LearnerReady)
        await controller.connection.send(kit.batch(kit.samples()))
        await asyncio.sleep(0.1)
        await controller.order(Shutdown())
        assert (await controller.news(StepDone)).version == 1
        assert await controller.ended() is None


def test_it_imports_no_torch():
    modules = "asyncrl.learner.fake, asyncrl.generate.worker, asyncrl.generate.doubles.fake"
    command = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"generate": {"engine": {"kind": "transformers"}}}, "needs one: set 'fake'"),
        ({"learner": {"fake_step_s": 0.0, "ranks": 2}}, "learner.ranks = 1"),
        ({"learner": {"fake_step_s": 0.0, "kind": "external"}}, "has no learner process"),
        ({"learner": {"fake_step_s": -1.0}}, "fake_step_s"),
        ({"placement": {"kind": "colocated"}, "buffer": {"max_staleness": 0}}, "set 'disaggregated'"),
    ],
)
def test_what_needs_a_model_is_refused_beside_it(settings, said):
    with pytest.raises(ConfigError, match=said):
        parse_config(FAKE | settings)
