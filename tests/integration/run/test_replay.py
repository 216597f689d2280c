"""Recorded runs of real processes, replayed: with deaths, a pause, a live change and a second life of the controller."""

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import zstandard

import asyncrl
from asyncrl.config.algorithm import KLConfig
from asyncrl.control.batch_feeder import RecordedStep
from asyncrl.errors import ConfigError
from asyncrl.observe.steps import read_events
from asyncrl.replay.decisions import replay_decisions, replay_run
from asyncrl.replay.learner import LearnerReplay, SampleReplay, WhatIf
from asyncrl.replay.untrained import untrained
from tests.integration.conftest import NO_EVALUATION, NO_MODEL, NO_MODELS, command_line, kill, kill_all, trained_groups


async def test_decisions_replay_over_deaths_a_pause_a_change_and_a_controller_that_was_killed(tiny):
    settings = {**NO_EVALUATION, **NO_MODELS, "buffer__policy": "drop", "observe__record": "decisions"}
    async with asyncrl.Run(tiny(num_steps=10_000, **settings)) as run:
        async for report in run.steps():
            if report.version == 3:
                kill(run.run_folder, "generator-0")
            if report.version == 6:
                await run.change({"buffer.max_staleness": 1, "learner.learning_rate": 5e-4})
                await run.pause()
                await run.resume()
            if report.version == 9:
                kill(run.run_folder, "learner")
            if report.version == 14:
                break
        kill_all(run.run_folder)
    goal = len(trained_groups(run.run_folder)) // 4 + 6
    async with asyncrl.Run(tiny(num_steps=goal, **settings), resume=run.run_folder) as again:
        status = await again.wait()
    assert (status.phase, status.version) == ("stopped", goal), status.reason
    assert len(trained_groups(run.run_folder)) == goal * 4
    told = list(read_events(run.run_folder))
    assert [event.seq for event in told] == list(range(1, len(told) + 1))
    assert [event.text for event in told if (event.kind, event.subject) == ("restart", "run")] == [status.resumed]
    killed, whole = replay_decisions(run.run_folder)
    assert (killed.difference, whole.difference, whole.fault) == ("", "", "")
    assert "was cut off" in killed.fault
    assert killed.last_step >= 12
    assert whole.last_step == goal - 1
    told = await asyncio.to_thread(command_line, "replay", run.run_folder)
    assert told.returncode == 0
    assert "it ends here: it was cut off" in told.stdout
    assert f"up to step {goal - 1}" in told.stdout


async def test_the_learner_replays_every_version_over_its_death_a_change_a_resume_and_checkpoints_that_went(tiny):
    config = tiny(
        num_steps=10_000, **NO_EVALUATION, checkpoint__every_steps=3, checkpoint__keep_last=1, observe__record="batches",
        generate__engine=NO_MODEL, learner__minibatches=2, algorithm__loss="cispo",
    )  # fmt: skip
    async with asyncrl.Run(config) as run:
        async for report in run.steps():
            if report.version == 4:
                await run.change({"learner.learning_rate": 5e-4})
            if report.version == 8:
                kill(run.run_folder, "learner")
                goal = (await run.status()).version + 6
                await run.change({"num_steps": goal})
    goal += 2
    config = msgspec.structs.replace(config, num_steps=goal, algorithm=msgspec.structs.replace(config.algorithm, kl=KLConfig()))
    async with asyncrl.Run(config, resume=run.run_folder) as again:
        assert (await again.wait()).version == goal
    folder, said = run.run_folder, list[str]()
    assert await asyncio.to_thread(replay_run, folder, None, (), said.append)
    assert said[-1] == f"learner: {goal} versions from their batches: the same weights as in the run"
    said.clear()
    assert await asyncio.to_thread(replay_run, folder, 9, ("algorithm.loss=gspo",), said.append)
    assert said[-2].startswith("learner: 9 versions")
    assert "step 9 with algorithm.loss=gspo: cosine of the gradients " in said[-1]
    assert "not another run" in said[-1]
    same = await asyncio.to_thread(gradients, folder, {"algorithm.loss": "cispo"})
    assert (same.cosine, same.norms[0]) == (pytest.approx(1.0), same.norms[1])
    other = await asyncio.to_thread(gradients, folder, {"algorithm.entropy_coefficient": 5.0})
    assert other.cosine < 0.99
    swapped = RecordedStep.path(folder / "record", 5)
    recorded = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(swapped.read_bytes()), type=RecordedStep)
    members = [msgspec.structs.replace(scored, reward=1.0 - scored.reward) for scored in recorded.groups[0].members[:2]]
    first = msgspec.structs.replace(recorded.groups[0], members=(*members, *recorded.groups[0].members[2:]))
    msgspec.structs.replace(recorded, groups=(first, *recorded.groups[1:])).write(folder / "record")
    said.clear()
    assert not await asyncio.to_thread(replay_run, folder, None, (), said.append)
    assert "version 6 has other weights than in the run: step 5 is the first" in said[-1]
    with pytest.raises(ConfigError, match="nope"):
        await asyncio.to_thread(replay_run, folder, 3, ("algorithm.nope=1",), said.append)
    RecordedStep.path(folder / "record", 4).write_bytes(b"(\xb5/\xfd" + bytes(range(64)))
    with pytest.raises(ConfigError, match=r"^[^ ]*step-000004\.bin is damaged: .*; the steps before it replay with --until 3"):
        await asyncio.to_thread(replay_run, folder, None, (), said.append)
    (folder / "record" / "versions.jsonl").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^[^ ]*versions\.jsonl is missing or empty"):
        await asyncio.to_thread(replay_run, folder, None, (), said.append)


async def test_drawn_samples_are_generated_again_bit_for_bit_over_changes_of_weights(tiny):
    settings = {
        **NO_EVALUATION, "buffer__policy": "drop", "algorithm__dynamic_sampling": True,
        "buffer__ahead": "as_allowed",
    }  # fmt: skip
    async with asyncrl.Run(tiny(num_steps=20, **settings, observe__record="all", generate__kv="keep")) as run:
        status = await run.wait()
    lost = Counter(one.reason for _, _, one in untrained(run.run_folder))
    assert lost
    assert lost == status.dropped
    early = [step for _, step, _ in untrained(run.run_folder, 9)]
    assert early == sorted(early)
    assert {*early} <= {*range(10)}
    (life,) = replay_decisions(run.run_folder)
    assert (life.difference, life.lost.keys()) == ("", lost.keys())
    learner = LearnerReplay(run.run_folder)
    samples = SampleReplay(learner, 2000, None)
    learner.run(on_version=samples.keep)
    again = await asyncio.to_thread(samples.run)
    assert again.difference == ""
    assert again.num_equal > 320, "all that 20 steps trained, and more that was lost"
    assert again.num_swapped > 0
    assert any(drawn.sample.group_id not in trained_groups(run.run_folder) for drawn in samples._drawn)
    learner = LearnerReplay(run.run_folder)
    learner.configs[0] = msgspec.structs.replace(learner.config, seed=1)
    other = SampleReplay(learner, 3, 0)
    assert "its tokens were" in (await asyncio.to_thread(other.run)).difference


def gradients(folder: Path, values: dict[str, object]) -> WhatIf:
    """Ask for the gradient of step 2 under other values."""
    replay = LearnerReplay(folder)
    assert replay.run(until=1) == (2, "")
    return replay.whatif(values)
