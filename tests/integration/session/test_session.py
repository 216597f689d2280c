"""A loop of one's own over a session: real processes, the learner in this one."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import asyncrl
from asyncrl.algorithms.losses import LOSSES
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.groups import GroupStream
from asyncrl.observe.samples import TOKENS_FILE, TokenRow
from asyncrl.observe.steps import read_lines
from asyncrl.schema.status import RELEASED
from asyncrl.tasks.registry import build_task
from asyncrl.tasks.task import PromptSequence
from tests.integration.conftest import NO_ENGINE, NO_EVALUATION, assert_balanced
from tests.integration.placement.test_synchronous_equality import plain_loop

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


def digest(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def by_length(_: asyncrl.Prompt, text: str) -> float:
    return float(len(text))


def gradients_of(session: asyncrl.Session) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in session.model.parameters() if parameter.grad is not None]


def versions(group: asyncrl.ScoredGroup) -> set[int]:
    return {int(version) for member in group.members for version in asyncrl.ids_from_bytes(member.sample.versions)}


async def trained_by(session: asyncrl.Session, how: str) -> None:
    """Train all steps of a session on its task's prompts: as it gives their batches, or in the loop of docs/python.md."""
    if how == "batches":
        async for groups in session.batches():
            await session.train_step(groups, rewards=scored(groups), loss="gspo")
        return
    prompts = PromptSequence(build_task(session.config.task, session.config.seed).train, session.config.seed)
    async with session.stream(prompts) as groups:
        async for batch in asyncrl.batched(groups, session.config.algorithm.groups_per_step):
            await session.train_step(batch, advantages=asyncrl.group_norm(scored(batch)), loss="gspo")


def scored(groups: list[asyncrl.ScoredGroup]) -> list[list[float]]:
    return [[by_length(group.prompt, member.sample.text) for member in group.members] for group in groups]


async def test_other_prompts_find_places_in_the_body_of_a_loop_over_batches_and_after_it(tiny):
    """What was generated ahead is released, the taken groups are kept, and the task's prompts come in order, each once."""
    config, taken = tiny(**NO_ENGINE, num_steps=6), list[str]()
    async with asyncio.timeout(120), asyncrl.Session(config) as session:
        order = PromptSequence(build_task(config.task, config.seed).train, config.seed)
        async for groups in session.batches():
            taken += [group.prompt.prompt_id for group in groups]
            first = await session.generate(SUMS[:1])  # the taken groups hold four of the eight places
            await session.release(first)
            late = session.stream(SUMS[:1])
            late._say_after_s = 0.2
            reading = asyncio.get_running_loop().create_task(anext(late))  # in a step nothing is put aside, but soon after it
            await session.train_step(groups)
            assert (await reading).prompt.text == "0+0="
            await late.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.generate(SUMS[:1]), 0.001)  # cancelled, whatever it was doing
            async with session.stream(SUMS) as others:
                assert (await anext(others)).prompt.text == "0+0="
            if session.version == 2:
                break
        assert len(await session.generate(SUMS[:2])) == 2
        gradients = await session.take()
        taken += [group.prompt.prompt_id for group in gradients]
        assert taken == [order[index].prompt_id for index in range(12)]
        assert_balanced(await session.run.status())


async def test_synchronous_loops_over_a_session_are_a_plain_loop_bit_for_bit(tiny):
    settings, ours = {**NO_EVALUATION, "generate__num_workers": 2, "buffer__max_staleness": 0, "num_steps": 4}, {}
    for how in ("batches", "stream"):
        async with asyncrl.Session(tiny(**settings, name=how)) as session:
            before = digest(session.model)
            await trained_by(session, how)
            ours[how] = digest(session.model)
            assert_balanced(await session.run.status())
    theirs = await plain_loop(tiny(**settings, algorithm__loss="gspo"), session.run.run_folder / "model", by_length)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in theirs.items())
    assert all(torch.equal(tensor, model[name]) for model in ours.values() for name, tensor in theirs.items())


async def test_losses_and_rewards_of_the_caller_who_may_be_cancelled_and_call_again(tiny, tmp_path):
    judged, lost = [], []

    async def reward(prompt: asyncrl.Prompt, text: str) -> float:
        judged.append((prompt.text, prompt.answer))
        await asyncio.sleep(0)
        return float(len(text) % 2)

    def loss(inputs, config):
        lost.append(inputs.logprobs.shape)
        return LOSSES["reinforce"](inputs, config)

    config = tiny(**NO_ENGINE, num_steps=5, broadcast={"medium": {"kind": "files", "folder": str(tmp_path / "weights")}})
    async with asyncrl.Session(config, reward=reward) as session:
        for what in (session.take, session.save):
            task = asyncio.get_running_loop().create_task(what())
            await asyncio.sleep(0.01)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # a quick machine has done it by then
                await task
        taken = await session.take()
        assert {member.reward for group in taken for member in group.members} <= {0.0, 1.0}
        with pytest.raises(asyncrl.RunError, match="not trained yet"):
            await session.take()
        await session.run.pause()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await session.train_step(taken, loss=loss)
        await session.run.resume()
        first = await session.train_step(taken, loss=loss)
        assert await session.train_step(taken, loss=loss) is first  # a retry trains nothing
        taken = await session.take()
        with pytest.raises(asyncrl.AsyncRLError, match="rewards must be given"):
            await session.train_step(taken, rewards=[[1.0]])
        with pytest.raises(asyncrl.ConfigError, match=r"algorithm\.loss"):
            await session.train_step(taken, loss="nope")
        with pytest.raises(ZeroDivisionError):
            await session.train_step(taken, loss=lambda logprobs, inputs: logprobs.sum() * (1 / 0))
        second = await session.train_step(taken, loss="cispo", learning_rate=5e-3)
        with pytest.raises(asyncrl.RunError, match=r"buffer\.max_staleness cannot change here: learner\.kind = 'driven'"):
            await session.run.change({"buffer.max_staleness": 1})
        third = await session.train_step(await session.take(), rewards=[[3.0] * 4] * 4)
        await session.release(await session.take())
        with pytest.raises(asyncrl.RunError, match="trained, released or dropped"):
            await session.train_step(taken)
        saved = await session.save()
        folder, loop, runs = session.run.run_folder, asyncio.get_running_loop(), [session.run]

        def ends_the_run(logprobs, inputs):
            while runs:
                asyncio.run_coroutine_threadsafe(runs.pop().stop(), loop).result()
            return -logprobs[inputs.mask].mean()

        with pytest.raises(asyncrl.RunError):
            await session.train_step(await session.take(), loss=ends_the_run)
        assert session.version == 4
    assert [step.version for step in (first, second, third)] == [1, 2, 3]
    assert len(lost) >= 1
    assert judged
    assert second.metrics["policy/learning_rate"] > 2 * first.metrics["policy/learning_rate"]
    assert third.metrics["reward/mean"] == 3.0
    assert saved.name == "step-000003"
    assert {row.step for row in read_lines(folder / TOKENS_FILE, TokenRow)} == {0, 1, 2, 3}
    async with asyncrl.Session(resume=folder, reward=reward) as session:  # whose run never heard of its last step
        assert (session.version, (await session.run.status()).version) == (4, 4)
        taken, (weights,) = await session.take(), (tmp_path / "weights").iterdir()
        prompts = PromptSequence(build_task(session.config.task, session.config.seed).train, session.config.seed)
        assert [group.prompt for group in taken] == [prompts[index] for index in range(20, 24)]  # 4 were released
        shutil.move(weights, tmp_path / "aside")
        with pytest.raises(asyncrl.AsyncRLError, match=r"version 5 was not published: .*No such file"):
            await session.train_step(taken)
        shutil.move(tmp_path / "aside", weights)
        assert (await session.train_step(taken)).version == 5
        with pytest.raises(asyncrl.RunError, match="all 5 steps are trained"):
            await session.take()
    ledger = LedgerReader(folder)
    assert {row.state: row.groups for row in ledger.counts()}["trained"] == 5 * 4


async def test_groups_of_the_caller_s_prompts_are_trained_or_released_and_never_too_old(tiny):
    config = tiny(**NO_ENGINE, num_steps=9, buffer__max_staleness=2, learner__dtype="auto")
    async with asyncrl.Session(config) as session:
        with pytest.raises(asyncrl.ConfigError, match="places for 12"):
            await session.generate(SUMS)
        late = await session.generate(SUMS[:4], n=2, max_new_tokens=2)
        assert [(group.prompt.text, len(group.members)) for group in late] == [(one["prompt"], 2) for one in SUMS[:4]]
        assert max(member.sample.num_tokens for group in late for member in group.members) <= 2
        again = await session.generate(SUMS[:4], n=2, max_new_tokens=2)  # other groups, which hold places of their own
        assert not {group.group_id for group in late} & {group.group_id for group in again}
        assert (await session.run.status()).groups["ready"] == 8
        await session.release(again)
        with pytest.raises(asyncrl.RunError, match=r"a step trains 4 groups .*got 3"):
            await session.train_step(late[:3])
        ages = []
        async with session.stream(SUMS) as groups:
            async for batch in asyncrl.batched(groups, 4):
                ages.append(session.version - min(map(min, map(versions, batch))))
                loss = await session.forward_backward(batch)
                with pytest.raises(asyncrl.RunError, match="in a step that has begun"):
                    await session.release(batch[:1])
                step = await session.optim_step()
                assert step.metrics["policy/loss"] == loss
                if step.version == 3:
                    break
        with pytest.raises(asyncrl.RunError, match=rf"group {late[0].group_id} .* oldest token is of version 0"):
            await session.train_step(late)
        assert max(ages) <= 2
        await session.release(late)
        for _ in range(2):  # all places are free again
            await session.release(await session.generate(SUMS[:12], n=1))
        status = await session.run.status()
        assert_balanced(status)
        assert status.groups["trained"] == 12
        assert status.groups["issued"] - 12 == sum(status.dropped.values())
        others, taken = await session.generate(SUMS[:4]), await session.take()
        with pytest.raises(asyncrl.AsyncRLError, match="loss nan"):
            await session.train_step(taken, loss=lambda logprobs, inputs: logprobs.sum() * math.nan)
        assert (await session.train_step(others)).version == 4
        await session.release(await session.take())
        assert (await session.train_step(await session.take())).version == 5


def clipped(logprobs: torch.Tensor, inputs: asyncrl.LossInputs) -> torch.Tensor:
    """What each token adds to `ppo_clip`, of its log-probability."""
    ratio = (logprobs - inputs.behaviour_logprobs).exp()
    return torch.maximum(-ratio * inputs.advantages, -ratio.clamp(0.8, 1.2) * inputs.advantages)


async def test_a_loss_of_logprobs_has_the_gradients_of_the_named_one_and_weights_change_and_go_out_when_they_are_told_to(tiny):
    """Of samples a step old, so that ratios are not 1 and clips hold; in several rows, of which the second fails."""
    settings = {"algorithm__kind": "policy", "algorithm__proximal": "behaviour", "algorithm__corrections": []}
    settings |= {"algorithm__loss": "reinforce", "algorithm__max_ratio": 1.1, "learner__warmup_steps": 0}
    settings |= {"learner__learning_rate": 3e-2, "learner__max_grad_norm": 1e9, "packing__tokens_per_row": 32}
    settings |= {"learner__minibatches": 2}
    async with asyncrl.Session(tiny(**NO_EVALUATION, num_steps=4, **settings), sync="manual") as session:

        async def gradients(**given: object) -> list[torch.Tensor]:
            loss = await session.forward_backward(groups, advantages=advantages, **given)
            found = gradients_of(session)
            assert await session.forward_backward(groups, advantages=advantages, **given) == loss
            assert all(map(torch.equal, gradients_of(session), found))
            session._open.abandon()
            session._open, session._group_ids = None, ()
            return found

        def own(logprobs: torch.Tensor, inputs: asyncrl.LossInputs) -> torch.Tensor:
            rows.append(os.getpid())
            return clipped(logprobs, inputs)[inputs.mask].sum() / inputs.denominators.num_tokens

        def fails_in_its_second_row(logprobs: torch.Tensor, inputs: asyncrl.LossInputs) -> torch.Tensor:
            loss = own(logprobs, inputs)
            return loss * (1 / (len(rows) == 1))

        before = digest(session.model)
        await session.forward_backward(await session.generate(SUMS[:4]), rewards=[[0.0, 1.0, 2.0, 3.0]] * 4)
        assert all(torch.equal(tensor, before[name]) for name, tensor in session.model.state_dict().items())
        done = await session.optim_step()
        assert await session.optim_step() is done
        assert done.version == session.version == 1
        groups, rows = await session.generate(SUMS[:4]), list[int]()
        assert set.union(*map(versions, groups)) == {0}
        advantages = asyncrl.group_norm([[float(i) for i, _ in enumerate(group.members)] for group in groups])
        named, ours = await gradients(loss="ppo_clip"), await gradients(loss=own)
        assert len(named) > 4
        assert set(rows) == {os.getpid()}  # no other process calls it
        for one, other in zip(named, ours, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-6)
        rows.clear()
        with pytest.raises(ZeroDivisionError):
            await session.forward_backward(groups, advantages=advantages, loss=fails_in_its_second_row)
        assert len(rows) == 2
        after_failure = await gradients(loss=own)
        again = session.forward_backward(groups, advantages=advantages, loss=own)
        task = asyncio.get_running_loop().create_task(again)
        rows.clear()
        while not rows:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        after_cancellation = await gradients(loss=own)
        for found in (after_failure, after_cancellation):
            assert all(map(torch.equal, found, await gradients(loss=own)))

        def fails_in_its_second_update(logprobs: torch.Tensor, inputs: asyncrl.LossInputs) -> torch.Tensor:
            return own(logprobs, inputs) * (1 / (len(rows) < num_rows + 2))

        rows.clear()
        num_rows = 1_000
        await session.forward_backward(groups, advantages=advantages, loss=fails_in_its_second_update)
        num_rows = len(rows)
        assert num_rows > 1
        with pytest.raises(ZeroDivisionError) as raised:
            await session.optim_step()
        assert "update 2 of 2 of step 1: those before it stand" in "".join(raised.value.__notes__)
        assert not any(gradient.any() for gradient in gradients_of(session))
        await session.release(groups)
        await session.sync_weights()
        while versions((await session.generate(SUMS[:1]))[0]) != {1}:
            pass


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("got neither", asyncrl.Session),
        (r"learner\.ranks = 1", lambda: asyncrl.Session("quickstart", overrides=["learner.ranks=2"])),
        ("must be a RunConfig, nested dicts, or the path", lambda: asyncrl.Session(5)),
        ("sync must be 'auto' or 'manual', got 'manuel'", lambda: asyncrl.Session("quickstart", sync="manuel")),
        (r"reward must be a function of \(prompt, text\), got 1.0", lambda: asyncrl.Session("quickstart", reward=1.0)),
        (r"one of \(prompts, texts\) is for", lambda: asyncrl.Session("quickstart", reward=lambda prompts, texts: [0.0])),
        ("n must be a whole number and at least 1, got 0", lambda: asyncrl.Session("quickstart").stream([], n=0)),
        ("rewards must be a list for each group", lambda: asyncrl.group_norm([1.0, 2.0])),
        ("not open", lambda: asyncrl.Session("quickstart").stream(SUMS)),
        ("not open", lambda: asyncrl.Session("quickstart").take()),
        ("not open", lambda: asyncrl.Session("quickstart").model),
    ],
)
async def test_what_a_session_cannot_do_is_said_before_anything_starts(message, make):
    async def call() -> None:
        if inspect.isawaitable(given := make()):
            await given

    with pytest.raises(asyncrl.AsyncRLError, match=message):
        await call()


async def no_batches(session: asyncrl.Session) -> None:
    async for _ in asyncrl.batched(session.stream(SUMS), 0):
        pass


PROMPT_MISTAKES = {
    "prompts must be several": lambda session: session.generate("1+1="),
    r"prompts must be several, as a list: \[prompt\]; got \{": lambda session: session.generate(SUMS[0]),
    "a prompt must be a text, a dict with `prompt`, or an asyncrl.Prompt; got 5": lambda session: session.generate([5]),
    "generate takes a list": lambda session: session.generate(iter(SUMS[:1])),
    "a prompt must have a text `prompt`": lambda session: session.generate([{"question": "1+1="}]),
    "n must be a whole number": lambda session: session.generate(SUMS[:1], n=1.5),
    "max_new_tokens must be at most .*, got 999": lambda session: session.generate(SUMS[:1], max_new_tokens=999),
    r"no group of prompt 0: failed: .* 46, over generate\.engine\.max_sequence_tokens \(16\)": lambda session: session.generate([
        "1" * 40
    ]),
    "a size of at least 1, got 0": no_batches,
    "already runs": lambda session: asyncrl.Session(session.config, reward=by_length).__aenter__(),
    "is open already": lambda session: session.__aenter__(),
}
STEP_MISTAKES = {
    r"list of groups that this session gave, got \[\]": {"groups": []},
    "list of groups that this session gave, got None": {"groups": None},
    "list of groups that this session gave, got ScoredGroup": {"groups": 0},
    "got 3 different ones": {"groups": slice(3)},
    r"rewards must be given for each member of each group, \[4": {"rewards": [[1.0]] * 4},
    "advantages must be a list for each group, of a number for each member": {"advantages": [1.0] * 4},
    "rewards must be a list for each group, .*NoneType": {"rewards": [[None] * 4] * 4},
    "rewards must be finite": {"rewards": [[math.nan] * 4] * 4},
    "learning_rate = -1": {"learning_rate": -1},
    r"algorithm\.loss must be one of": {"loss": "nope"},
    "a loss is a name, .*3 is not a callable": {"loss": 3},
    "a loss is a name, .*positional arguments": {"loss": lambda logprobs: logprobs.sum()},
    r"loss must have shape \[\]": {"loss": lambda logprobs, inputs: -logprobs},
    "must be an array .*got NoneType": {"loss": lambda logprobs, inputs: None},
    "loss has no gradient": {"loss": lambda logprobs, inputs: logprobs.detach().sum()},
    "loss nan, .*weights were not changed": {"loss": lambda logprobs, inputs: logprobs.sum() * math.nan},
    "first argument is `inputs`, not `logprobs`, must return .*LossOutputs, got Tensor": {
        "loss": lambda inputs, config: inputs.logprobs.sum()
    },
}


async def test_each_mistake_is_one_error_after_which_the_same_groups_are_trained(tiny, caplog):
    config = tiny(**NO_ENGINE, num_steps=4, buffer__max_staleness=0, packing__tokens_per_row=512)
    taking = list[asyncio.Task[object]]()
    with pytest.raises(ZeroDivisionError):
        await make_mistakes(session := asyncrl.Session(config, reward=by_length), caplog, taking)
    with pytest.raises(asyncrl.RunError, match="not open"):
        await taking[0]
    await session.__aexit__(None, None, None)
    with pytest.raises(asyncrl.RunError, match="not open"):
        await session.save()
    trained = digest(session.model)
    async with asyncrl.Session(resume=session.run.run_folder, reward=by_length) as session:
        assert session.version == 1
        assert all(torch.equal(tensor, trained[name]) for name, tensor in session.model.state_dict().items())


async def test_a_session_that_ended_over_a_step_is_resumed_with_all_its_places(tiny):
    config = tiny(**NO_ENGINE, num_steps=2, buffer__max_staleness=0)
    with pytest.raises(ZeroDivisionError):
        async with (session := asyncrl.Session(config)):
            await session.train_step(await session.take(), loss=lambda logprobs, inputs: logprobs.sum() * (1 / 0))
    async with asyncio.timeout(200), asyncrl.Session(resume=session.run.run_folder) as session:
        assert (await session.train_step(await session.take())).version == 1
        status = await session.run.status()
        assert (status.groups["trained"], status.dropped) == (4, {RELEASED: 4})


async def make_mistakes(opened: asyncrl.Session, caplog: pytest.LogCaptureFixture, taking: list[asyncio.Task[object]]) -> None:
    async with opened as session:
        for message, call in PROMPT_MISTAKES.items():
            with pytest.raises(asyncrl.AsyncRLError, match=message):
                await call(session)
        groups = await session.generate(SUMS[:4])
        for message, given in STEP_MISTAKES.items():
            given, which = dict(given), given.get("groups", slice(4))
            given.pop("groups", None)
            with pytest.raises(asyncrl.AsyncRLError, match=message):
                await session.train_step(groups[which] if isinstance(which, (slice, int)) else which, **given)
        with pytest.raises(asyncrl.ConfigError, match=f"group {groups[0].group_id} is in the list twice"):
            await session.train_step([*groups, groups[0]])
        await session.release(groups)  # also those of a step that failed
        groups = await session.generate(SUMS[:4])
        with pytest.raises(AttributeError) as raised:
            await session.train_step(groups, loss=lambda lp, inputs: -lp.sum())
        assert "(logprobs, inputs) to a scalar tensor" in "".join(raised.value.__notes__)
        assert session.version == 0
        before = digest(session.model)
        async with asyncio.TaskGroup() as at_once:
            first, saved, again = (
                at_once.create_task(call) for call in (session.train_step(groups), session.save(), session.train_step(groups))
            )
        assert (first.result().version, again.result().version) == (1, 1)
        written = AutoModelForCausalLM.from_pretrained(saved.result()).state_dict()
        weights = {"step-000000": before, "step-000001": digest(session.model)}[saved.result().name]
        assert all(torch.equal(tensor, weights[name]) for name, tensor in written.items())
        await session.generate(SUMS[:4])  # and has all places from now on
        one = GroupStream(session.run, SUMS[:1], 1, 0, 1, lambda: False, say_after_s=0.2)
        async with asyncio.timeout(60):
            while "4 groups are neither trained nor released" not in caplog.text:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(anext(one), 1.0)
        await one.close()
        taking.append(asyncio.get_running_loop().create_task(session.take()))
        await asyncio.sleep(0)  # it waits for a place
        1 / 0  # noqa: B018 - the last mistake
