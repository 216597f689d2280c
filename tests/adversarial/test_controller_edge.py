"""The controller's edge: a peer is believed only about itself, and nothing it says raises out of a loop of the controller.

Each attack that was tried once is a test of its own. The property drives every role with every message, in several states.
"""

import asyncio
import tempfile
import types
import typing
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.control.api import ExternalWeights, RunApi
from asyncrl.control.dispatcher import MOST_GUEST_FAILURES
from asyncrl.control.edge import MOST_REFUSALS
from asyncrl.control.lifecycle.events import DrainRequested, PauseRequested
from asyncrl.errors import ConnectionClosed, RunError
from asyncrl.observe.steps import read_steps
from asyncrl.schema import control
from asyncrl.schema.codec import MESSAGE_TYPES, decode, encode
from asyncrl.schema.samples import (
    GroupWork,
    InferResult,
    Progress,
    Prompt,
    SampleFailure,
    SamplingParams,
    StepBatch,
    StepDone,
    ids_to_bytes,
    logprobs_to_bytes,
)
from asyncrl.schema.status import ExternalGroup
from asyncrl.schema.weights import VersionLive, WeightsAvailable, WeightsManifest
from asyncrl.transport.protocol import Lane
from tests.builders import answer_to, hello, receive, score_of, until
from tests.unit.control.test_controller import generate, running

GUEST = "joined-b-7-0"


async def settled(world, refused):
    """Wait until so many messages were refused."""
    await until(lambda: world.controller.edge.refused.total() >= refused)


def weights(version):
    return WeightsAvailable(version, "none", "", WeightsManifest((), 0), "", 0.0)


# -- the attacks that were tried -----------------------------------------------------------------------------------------

FROM_A_GUEST = [
    control.ModelsReady(GUEST, ("m",), 1), StepDone(10**6, 10**6 + 1, {}, 0.0, 1.0), control.LearnerReady(10**6, "model"),
    control.LearnerReady(0, "model"), control.Fault("nobody", "it fell over", fatal=True),
    control.Fault("learner", "it fell over", fatal=True), control.Fault("generator-0", "it fell over", fatal=False),
    weights(10**7), control.CheckpointDone(10**6, "/", 0.1), control.EngineRoom("generator-0", 0),
    control.EngineReady("generator-0", 0, 0), VersionLive(10**7, GUEST, 0.0, 0.0, 0.0),
    VersionLive(0, "generator-0", 0.0, 0.0, 0.0), control.Heartbeat("learner", 0.0), control.Heartbeat(GUEST, float("nan")),
    control.Heartbeat(GUEST, 0.0, "\x1b[2Ja screen of its own"), control.Heartbeat(GUEST, 0.0, "w" * 10**5),
    control.Heartbeat(GUEST, 0.0, gauges={"n" * 10**5: 1.0}), control.PhaseReached("learner", "train", 0), score_of(0, 0),
    InferResult(0, 0, 0), GroupWork(0, 0, Prompt("p"), (0,), SamplingParams(max_new_tokens=1), 0),
]  # fmt: skip


@pytest.mark.parametrize("message", FROM_A_GUEST, ids=[f"{i}-{type(each).__name__}" for i, each in enumerate(FROM_A_GUEST)])
async def test_what_a_guest_says_of_others_is_refused_and_counted(world, message):
    await world.start()
    guest = await world.let_in()
    await guest.send(message, Lane.CONTROL)
    await settled(world, 1)
    assert world.controller.edge.refused == {(GUEST, type(message).__name__): 1}
    assert world.controller.lifecycle.phase not in {"failed", "stopped"}
    assert world.buffer.newest_version == 0
    assert RunApi(world.controller).status().refused_messages == 1


async def test_an_engine_with_no_slots_is_refused(world):
    await world.launcher.started("generator-0")
    generator = await world.join("generator", "generator-0")
    await generator.send(control.EngineReady("generator-0", 0, -1), Lane.CONTROL)
    await settled(world, 1)
    assert len(world.buffer.state.pool) == 0


OTHERS = {"group": "other"}
"""Of a group that another generator has."""
BAD_SAMPLES = {
    "another generator's group": {"generator": GUEST} | OTHERS, "in another's name": {"generator": "generator-0"},
    "an attempt that breaks the ledger": {"attempt": 2**63}, "an attempt that was not given out": {"attempt": 7},
    "a start that is no number": {"started_s": float("nan")}, "an end that is no number": {"finished_s": float("inf")},
    "no such member": {"indices": (5,)}, "a member before the first": {"indices": (-1,)}, "no member at all": {"indices": ()},
    "a member twice": {"indices": (1, 1)}, "no such group": {"group_id": 10**6},
    "lengths that no memory holds": {"lengths": (2**63,)}, "lengths that are not its arrays'": {"lengths": (2**40,)},
    "a text of megabytes for two tokens": {"texts": ("A" * (2 << 20),)},
}  # fmt: skip
BAD_PROGRESS = {
    "another generator's group": OTHERS, "an attempt that was not given out": {"attempt": 7}, "no such member": {"index": 5},
    "no token": {"token_ids": b"", "logprobs": b""}, "half a token": {"token_ids": b"\0\0\0\0\0"},
    "a token without its logprob": {"logprobs": b""}, "more tokens than a sample has": {"start": 10**6},
    "a start before the first": {"start": -1}, "a logprob that is no number": {"logprobs": logprobs_to_bytes([float("nan")])},
    "a token id below 0": {"token_ids": ids_to_bytes([-1])},
}  # fmt: skip
BAD = {f"{kind}: {case}": (kind, changes)
       for kind, cases in (("Samples", BAD_SAMPLES), ("Progress", BAD_PROGRESS)) for case, changes in cases.items()}  # fmt: skip


@pytest.mark.parametrize(("kind", "changes"), BAD.values(), ids=BAD)
async def test_samples_and_tokens_that_are_not_this_guests_own_are_refused(world, kind, changes):
    _, _, generator = await world.start(version_is_live=False)
    guest = await world.let_in()
    own = await receive(guest, GroupWork, Lane.DATA)
    await receive(guest, GroupWork, Lane.DATA)
    await generator.send(VersionLive(0, "generator-0", 0.0, 0.0, 0.0), Lane.CONTROL)
    group, fields = world.buffer.state.groups[own.group_id], dict(changes)
    if fields.pop("group", ""):
        group.holders[0] = "generator-0"
    right = {
        "Samples": answer_to(own, 1, GUEST),
        "Progress": Progress(own.group_id, 1, own.attempt, 0, ids_to_bytes([1]), logprobs_to_bytes([-1.0])),
    }
    await guest.send(msgspec.structs.replace(right[kind], **fields))
    await settled(world, 1)
    assert group.members[1] == "pending"
    assert world.controller.edge.refused == {(GUEST, kind): 1}


async def test_a_sample_of_another_prompt_than_its_group_is_refused(world):
    _, _, generator = await world.start()
    work = await receive(generator, GroupWork, Lane.DATA)
    await generator.send(answer_to(work, 0))
    await generator.send(answer_to(work, 1, prompt_ids=ids_to_bytes([9, 9, 9])))
    await settled(world, 1)
    assert world.buffer.state.groups[work.group_id].members == ["generated", "pending"]


async def test_forged_versions_let_no_forged_tokens_in(world):
    """The attack that trained tokens of version 1,000,000: first the version, then samples of it."""
    await world.start(version_is_live=False)
    guest = await world.let_in()
    await guest.send(weights(10**7), Lane.CONTROL)
    work = await receive(guest, GroupWork, Lane.DATA)
    await guest.send(answer_to(work, 0, GUEST, versions=(10**6, 10**6)))
    await settled(world, 1)
    await until(lambda: world.buffer.state.member_state(work.group_id, 0) != "pending")
    assert world.buffer.state.member_state(work.group_id, 0) == "failed"
    assert world.buffer.newest_version == 0


async def test_a_learner_cannot_announce_or_finish_what_was_never_taken_nor_pass_over_a_step(world):
    """A step that was passed over would stay taken for ever."""
    learner, reward, generator = await world.start()
    for message in (weights(1), StepDone(0, 1, {}, 0.0, 1.0)):
        await learner.send(message, Lane.CONTROL)
    await settled(world, 2)
    await generate(generator, reward, 4)
    assert [(await receive(learner, StepBatch, Lane.DATA)).step for _ in range(2)] == [0, 1]
    await learner.send(StepDone(1, 2, {}, 0.0, 1.0), Lane.CONTROL)
    await settled(world, 3)
    assert (world.controller.feeder.version, world.buffer.newest_version, world.buffer.counts().trained) == (0, 0, 0)


async def test_a_learner_says_which_checkpoint_it_began_from_and_it_must_be_one_of_this_run(world, tmp_path):
    await world.launcher.started("generator-0")
    learner = await world.join("learner", "learner")
    await learner.send(control.LearnerReady(0, "model", {}, "/elsewhere/step-000000"), Lane.CONTROL)
    await settled(world, 1)
    await learner.send(control.LearnerReady(0, "model", {}, str(tmp_path / "checkpoints" / "step-000000")), Lane.CONTROL)
    await until(lambda: world.controller.feeder.version >= 0)
    assert RunApi(world.controller).status().resumed == ""  # it was not: nothing was issued before


async def test_a_score_of_a_worker_that_was_not_asked_is_refused(tmp_path):
    async with running(tmp_path, reward={"num_workers": 2}) as world:
        _, reward, generator = await world.start()
        other = await world.join("reward", "reward-1")
        work = await receive(generator, GroupWork, Lane.DATA)
        await generator.send(answer_to(work))
        await until(lambda: any(peer.connection.unacknowledged() for peer in world.controller.peers.of("reward")))
        asked = {peer.name for peer in world.controller.peers.of("reward") if peer.connection.unacknowledged()}
        liar = other if asked == {"reward-0"} else reward
        await liar.send(score_of(work.group_id, 0, attempt=work.attempt))
        await settled(world, 1)
        assert world.buffer.state.member_state(work.group_id, 0) == "generated"


async def test_failures_without_words_end_nothing(tmp_path):
    async with running(tmp_path, supervision={"backoff_s": 0.01}) as world:
        _, _, generator = await world.start()
        for _ in range(4):
            work = await receive(generator, GroupWork, Lane.DATA)
            for index in work.indices:
                await generator.send(SampleFailure(work.group_id, index, work.attempt, "generate", ""))
        await receive(generator, GroupWork, Lane.DATA)


@pytest.mark.parametrize("name", ["reward/mean", "reward/std", "data/trained_tokens", "staleness/max"])
async def test_figures_of_a_step_that_are_not_finite_are_left_out_and_its_line_can_be_read(world, tmp_path, name):
    learner, reward, generator = await world.start()
    await generate(generator, reward, 2)
    batch = await receive(learner, StepBatch, Lane.DATA)
    await learner.send(StepDone(batch.step, batch.step + 1, {name: float("nan")}, 0.0, 1.0), Lane.CONTROL)
    async with asyncio.timeout(30):
        while not (steps := read_steps(tmp_path)):
            await asyncio.sleep(0.01)
    assert [step.version for step in steps] == [1]


async def test_the_third_refusal_in_a_minute_ends_the_connection_with_one_line(world, caplog):
    await world.start()
    guest = await world.let_in()
    for _ in range(MOST_REFUSALS):
        await guest.send(control.Heartbeat("learner", 0.0), Lane.CONTROL)
    await until(lambda: guest.closed_reason and not world.controller.membership.joined)
    lines = [record.message for record in caplog.records if "is ended" in record.message]
    assert lines == [
        f"the connection of {GUEST} is ended: its messages were refused, the last, a Heartbeat: it speaks for 'learner'"
    ]


async def test_a_guest_whose_samples_all_fail_is_sent_away_with_one_line_and_the_run_goes_on(tmp_path, caplog):
    async with running(tmp_path, supervision={"max_failed_share": 0.01}) as world:
        _, _, generator = await world.start(version_is_live=False)
        guest = await world.let_in()
        for _ in range(MOST_GUEST_FAILURES // 2):
            work = await receive(guest, GroupWork, Lane.DATA)
            for index in work.indices:
                await guest.send(SampleFailure(work.group_id, index, work.attempt, "generate", "no such kernel"))
        await until(lambda: not world.controller.membership.joined)
        lines = [record.message for record in caplog.records if "is ended" in record.message]
        reason = f"{MOST_GUEST_FAILURES} of its samples in a row failed, the first: no such kernel"
        assert lines == [f"the connection of {GUEST} is ended: {reason}"]
        with pytest.raises(ConnectionClosed, match=reason):
            await receive(guest, control.Shutdown)
        failures = world.controller.dispatcher.failures
        assert (failures.share, failures.verdict, failures.set_aside) == (0.0, "", {})
        await generator.send(VersionLive(0, "generator-0", 0.0, 0.0, 0.0), Lane.CONTROL)
        assert len((await receive(generator, GroupWork, Lane.DATA)).indices) == 2
        assert world.controller.lifecycle.phase == "running"


async def test_a_submitted_group_with_token_ids_beyond_the_vocabulary_is_refused(world, tmp_path):
    work = GroupWork(0, 0, Prompt("mine"), (0,), None, 0)
    early = RunApi(world.controller)
    beyond = ExternalGroup(Prompt("mine"), tuple(answer_to(work, token_ids=ids_to_bytes([3, 500])).members()))
    assert early.submit(beyond).group_id == 0  # nothing is known of the model yet
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 100}')
    world.controller.know_model(str(tmp_path / "model"))
    assert world.buffer.counts().dropped == {"token ids beyond the vocabulary": 1}
    refused = early.submit(beyond)
    assert "token id 500 is beyond the model's vocabulary of 100" in refused.refused
    assert early.submit(ExternalGroup(Prompt("mine"), tuple(answer_to(work).members()))).group_id == 1


async def test_stop_tokens_go_with_every_group_and_one_beyond_the_vocabulary_ends_the_run(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    generate = {"num_workers": 1, "engine": {"kind": "fake"}, "sampling": {"stop_token_ids": [7, 100]}}
    async with running(tmp_path / "run", generate=generate) as world:
        _, _, generator = await world.start()
        assert (await receive(generator, GroupWork, Lane.DATA)).sampling.stop_token_ids == (7, 100)
        world.launcher.history[0].exit(-9)
        await world.launcher.started("learner", 2)
        learner = await world.join("learner", "learner")
        await learner.send(control.LearnerReady(0, str(tmp_path)), Lane.CONTROL)
        await world.until("failed")
        said = "generate.sampling.stop_token_ids must be under 100, the size of the model's vocabulary, got 100"
        assert said in world.controller.lifecycle.reason


async def test_an_outside_learner_cannot_announce_a_version_that_no_step_made(tmp_path):
    async with running(tmp_path, learner={"kind": "external"}) as world:
        with pytest.raises(RunError, match="there is no version 7: 0 steps were taken"):
            RunApi(world.controller).announce_weights(ExternalWeights(weights(7), "model"))
        odd = msgspec.structs.replace(weights(0), published_s=float("nan"))
        with pytest.raises(RunError, match="nan is no usable number"):
            RunApi(world.controller).announce_weights(ExternalWeights(odd))


async def test_the_first_version_of_an_outside_learner_comes_with_its_model_s_folder(tmp_path):
    async with running(tmp_path, learner={"kind": "external"}) as world:
        with pytest.raises(RunError, match="give model_folder with the first version"):
            RunApi(world.controller).announce_weights(ExternalWeights(weights(0)))
        RunApi(world.controller).announce_weights(ExternalWeights(weights(0), "model"))
        RunApi(world.controller).announce_weights(ExternalWeights(weights(0)))


@pytest.mark.parametrize("is_writable", [True, False])
async def test_a_batch_that_kills_the_learner_twice_is_set_aside_and_named(world, tmp_path, caplog, is_writable):
    if not is_writable:
        (tmp_path / "set_aside").write_text("no folder can be made here")
    learner, reward, generator = await world.start()
    await generate(generator, reward, 4)
    for life in (1, 2, 3, 4):
        await receive(learner, StepBatch, Lane.DATA)
        (await world.launcher.started("learner", life)).exit(-9)
        await world.launcher.started("learner", life + 1)
        learner = await world.join("learner", "learner")
        await learner.send(control.LearnerReady(0, "model"), Lane.CONTROL)
    await until(lambda: world.buffer.counts().dropped == {"the learner died over it 2 times": 4})
    where = "in" if is_writable else "without a copy"
    assert f"groups 0, 1 are set aside {where}" in caplog.text
    if is_writable:
        paths = sorted((tmp_path / "set_aside").iterdir())
        assert [path.name for path in paths] == ["step-0-group-0.msgpack", "step-0-group-2.msgpack"]
        groups = [[group["group_id"] for group in msgspec.msgpack.decode(path.read_bytes())] for path in paths]
        assert groups == [[0, 1], [2, 3]]


# -- every message, every role, several states ---------------------------------------------------------------------------

NAMES = st.sampled_from(["learner", "generator-0", "reward-0", "inference-0", GUEST, "nobody", "", "model", "/", "train", "\x00"])
INTS = st.sampled_from([-(2**63), -2, -1, 0, 0, 0, 1, 1, 2, 3, 7, 64, 2**31, 10**6, 2**63 - 1, 2**63, 2**64 - 1])
FLOATS = st.sampled_from([0.0, 1.0, -1.0, 1e300, float("nan"), float("inf"), float("-inf")])
BYTES = st.sampled_from([
    b"", b"\0", ids_to_bytes([1, 2]), ids_to_bytes([0, 0]), ids_to_bytes([-1]), logprobs_to_bytes([-0.5, -0.25]),
])  # fmt: skip


def strategy_of(annotation):
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return strategy_of(arguments[0])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in {typing.Union, types.UnionType}:
        return st.one_of(*map(strategy_of, arguments))
    if origin is tuple:
        return st.lists(strategy_of(arguments[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(strategy_of(arguments[0]), strategy_of(arguments[1]), max_size=2)
    plain = {int: INTS, float: FLOATS, str: NAMES, bytes: BYTES, bool: st.booleans(), type(None): st.none()}
    return plain[annotation] if annotation in plain else struct_of(annotation)


def struct_of(kind):
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {name: strategy_of(hints[name]) for name in kind.__struct_fields__}
    return st.builds(lambda **values: kind(**values), **fields)


ANY_MESSAGE = st.one_of(*map(struct_of, MESSAGE_TYPES))
ROLES = {"learner": "learner", "generator-0": "generator", "reward-0": "reward", "inference-0": "inference", GUEST: "generator"}
SAID = st.lists(st.tuples(st.sampled_from(sorted(ROLES)), ANY_MESSAGE, st.sampled_from(list(Lane))), min_size=5, max_size=40)


def crosses(message):
    try:
        return decode(encode(message))
    except Exception:  # noqa: BLE001 - what the codec refuses never comes to the controller
        return None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(said=SAID, state=st.sampled_from(["fresh", "running", "paused", "draining"]), model=st.booleans())
def test_no_message_of_a_peer_raises_out_of_the_controller(said, state, model):
    judge = {"inference": {"reward_models": [{"name": "judge", "path": "judge"}]}} if model else {}

    async def live(folder):
        async with running(folder, **judge) as world:
            peers = {}
            if state != "fresh":
                learner, reward, generator = await world.start()
                peers = {"learner": learner, "reward-0": reward, "generator-0": generator}
            if state == "paused" and world.controller.lifecycle.phase == "running":
                world.controller.post(PauseRequested())
            if state == "draining":
                world.controller.post(DrainRequested())
            world.controller.membership.most_joined = 1
            for name, message, lane in said:
                message = crosses(message)
                if message is None or world.controller.ending.is_set():
                    continue
                connection = peers.get(name)
                if connection is None or connection.closed_reason:
                    if name == GUEST:
                        world.controller.membership.refusal(hello("generator", GUEST))
                    connection = peers[name] = await world.join(ROLES[name], name)
                try:
                    connection.try_send(message, lane)
                except ConnectionClosed:
                    peers.pop(name)
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            assert world.buffer.newest_version <= world.buffer.state.next_step

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(live(Path(folder)))
