"""The official client of OpenAI against the endpoint of a session, over real processes."""

import asyncio
import contextlib
import json
import os
import signal
import string

import aiohttp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import asyncrl
from asyncrl.learner.model.policy import character_tokenizer
from tests.integration.conftest import NO_EVALUATION, assert_balanced

openai = pytest.importorskip("openai")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}"
    "{% for call in turn.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}<assistant>"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = '12<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
LONG = 900


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with a chat template: it calls the tool where there is one, and else says `ab` over and over."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer("".join(dict.fromkeys(string.printable[:95])))
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=1200, pad_token_id=0, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    llama = LlamaForCausalLM(config)
    asked = [{"role": "user", "content": "1+1"}]
    call = tokenizer.apply_chat_template(asked, tools=[TOOL], add_generation_prompt=True, tokenize=False) + CALL
    called, endless = [*tokenizer(call)["input_ids"], tokenizer.eos_token_id], tokenizer("1+1=" + "ab" * 100)["input_ids"]
    ids = torch.tensor([called + [0] * (len(endless) - len(called)), endless])
    labels = ids.masked_fill(ids == 0, -100)
    labels[0, : len(called) - len(CALL) - 1] = -100
    optimizer = torch.optim.Adam(llama.parameters(), 5e-3)
    for _ in range(100):
        optimizer.zero_grad()
        loss = llama(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        optimizer.step()
    assert loss < 0.3, "the model of these tests has not learned its two answers"
    llama.lm_head.weight.data *= 2  # what it does most of the time it now does always
    llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def config(tiny, model):
    """Of a session over that model; its samples are rewarded later."""

    def make(**settings):
        return tiny(
            **NO_EVALUATION, num_steps=6, model={"kind": "pretrained", "path": str(model)}, learner__learning_rate=1e-5,
            generate__engine__max_sequence_tokens=LONG + 200, generate__sampling__max_new_tokens=LONG,
            generate__engine__num_slots=16, packing__tokens_per_row=4096, buffer__max_staleness=2, **settings,
        )  # fmt: skip

    return make


@pytest.fixture
async def clients():
    """Give clients of endpoints, which are closed at the end."""
    async with contextlib.AsyncExitStack() as opened:

        async def client(endpoint):
            made = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, timeout=240)
            return await opened.enter_async_context(made)

        yield client


def later(prompt: asyncrl.Prompt, text: str) -> float:
    return 0.0


async def test_tokens_of_a_stream_are_those_that_are_trained_across_a_swap_of_weights(config, clients):
    async with asyncrl.Session(config(), reward=later, sync="manual") as session, asyncrl.Endpoint(session) as endpoint:
        client = await clients(endpoint)
        await session.train_step(await session.generate(["1+1="] * 4, n=2, max_new_tokens=4))  # version 1, nobody has it yet
        pid = await generator_of(session)
        told, texts, logprobs = {0: [], 1: []}, {0: "", 1: ""}, {0: [], 1: []}
        stream = await client.completions.create(
            model="any", prompt="1+1=", n=2, logprobs=0, stream=True, extra_body={"return_token_ids": True},
            stream_options={"include_usage": True},
        )  # fmt: skip
        async for part in stream:
            for choice in part.choices:
                if not any(told.values()):
                    os.kill(pid, signal.SIGSTOP)  # until the weights are there
                    await session.sync_weights()
                    os.kill(pid, signal.SIGCONT)
                told[choice.index] += choice.token_ids
                texts[choice.index] += choice.text
                logprobs[choice.index] += choice.logprobs.token_logprobs
        assert (part.usage.completion_tokens, part.system_fingerprint) == (sum(map(len, told.values())), "versions 0 to 1")
        endpoint.reward(part.id, [1.0, 0.0])
        for reward in (1.0, 2.0, 3.0):
            answer = await client.completions.create(
                model="any", prompt=[ord(one) - ord(" ") + 2 for one in "1+1="], n=2, max_tokens=5, logprobs=0
            )
            said = {"id": answer.id, "rewards": [reward, 0.0]}
            assert (await client.post("/rewards", body=said, cast_to=object))["state"] == "waits for a step"
        (groups,) = [groups async for groups in until_trained(session, endpoint)]
        with pytest.raises(asyncrl.RunError, match="was given to a step"):
            endpoint.reward(part.id, [1.0, 0.0])
        assert_balanced(await session.run.status())
    first = groups[0]
    assert [member.reward for group in groups for member in group.members] == [1.0, 0.0, 1.0, 0.0, 2.0, 0.0, 3.0, 0.0]
    for number, member in enumerate(first.members):
        sample = member.sample
        assert told[number] == asyncrl.ids_from_bytes(sample.token_ids).tolist()
        assert logprobs[number] == pytest.approx(asyncrl.logprobs_from_bytes(sample.logprobs).tolist())
        assert texts[number] == sample.text
        assert np.all(np.diff(asyncrl.ids_from_bytes(sample.versions)) >= 0)
        assert {0, 1} == set(asyncrl.ids_from_bytes(sample.versions).tolist())


async def generator_of(session):
    """Return the generator's pid, once it has one."""
    while True:
        (pid,) = [one.pid for one in (await session.run.status()).processes if one.kind == "generator"]
        if pid:
            return pid
        await asyncio.sleep(0.01)


async def asking(http, url, said):
    return await http.post(url, json=said)


async def until_trained(session, endpoint):
    """Train one step; give its groups."""
    async for groups in endpoint.batches():
        await session.train_step(groups)
        yield groups
        return


async def test_chat_tools_what_is_refused_and_a_stream_whose_generator_dies_goes_on_with_the_same_tokens(config, clients):
    async with asyncrl.Session(config(), reward=later) as session, asyncrl.Endpoint(session, ignored=["seed"]) as endpoint:
        client = await clients(endpoint)
        asked = {"model": "m", "messages": [{"role": "user", "content": "1+1"}], "tools": [TOOL], "max_tokens": 100}
        answers = [await client.chat.completions.create(**asked, n=4, seed=7, logprobs=True)]
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            answers.append(await stream.get_final_completion())
        for answer in answers:
            message = answer.choices[0].message
            assert (answer.choices[0].finish_reason, message.role, message.content) == ("tool_calls", "assistant", "12")
            (call,) = message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        assert "".join(token.token for token in answers[0].choices[0].logprobs.content).startswith(CALL)
        turns = [*asked["messages"], message.model_dump(exclude_none=True)]
        turns.append({"role": "tool", "content": "2", "tool_call_id": call.id})
        turns.append({"role": "user", "content": [{"type": "text", "text": "more"}]})
        last = await client.chat.completions.create(model="m", messages=turns, max_completion_tokens=3)
        assert (last.choices[0].finish_reason, last.usage.completion_tokens) == ("length", 3)
        (model,) = (await client.models.list()).data
        assert (model.id, model.max_model_len) == ("tiny", LONG + 200)
        too_long = [{"role": "user", "content": "1" * (LONG + 190)}]
        wrong = {
            "temperature": {"temperature": 0.3}, "stop": {"stop": ["x"]}, "top_logprobs": {"top_logprobs": 2, "logprobs": True},
            "n": {"n": 0}, "tool_choice": {"tool_choice": "required"}, "max_tokens": {"max_tokens": 0},
            "response_format": {"response_format": {"type": "json_object"}}, "messages": {"messages": too_long, "max_tokens": 50},
            "messages[0]": {"messages": [{"role": "robot", "content": "x"}]}, None: {"extra_body": {"nonsense": 1}},
        }  # fmt: skip
        for param, change in wrong.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**asked | change)
            assert refused.value.body["param"] == param, refused.value
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError):
            await client.post("/rewards", body={"id": "nobody", "rewards": [1.0]}, cast_to=object)
        with pytest.raises(openai.BadRequestError, match="for each member"):
            await client.post("/rewards", body={"id": last.id, "rewards": [1.0, 2.0]}, cast_to=object)
        called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "[" * 10**5}}]}
        bodies = {
            "chat/completions": [b"{", b'{"messages": [{"role": [], "content": "x"}]}'],
            "completions": [b'{"prompt": "\\u0000"}', b'{"prompt": ["a", "b"]}', b'{"prompt": ""}', b'{"prompt": [-1]}'],
            "rewards": [b'{"id": "\xff", "rewards": [1]}', b'{"id": "x"}', f'{{"id": "{last.id}", "rewards": [1e300]}}'.encode()],
        }
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as http:
            for route, raw in ((route, raw) for route, several in bodies.items() for raw in several):
                async with http.post(f"{endpoint.base_url}/{route}", data=raw) as refused:
                    assert (refused.status, (await refused.json())["error"]["type"]) == (400, "invalid_request_error"), raw
        with pytest.raises(openai.BadRequestError, match="tokens"):
            await client.chat.completions.create(model="m", messages=[called])
        neutral = {"frequency_penalty": 0, "presence_penalty": 0, "parallel_tool_calls": True, "temperature": 1.0, "n": None}
        assert (await client.chat.completions.create(**asked | neutral, service_tier="auto")).choices
        status = await session.run.status()
        assert (status.failed_share, status.refused_messages) == (0.0, 0)
        await goes_on_where_its_generator_dies(session, endpoint, client)


async def test_an_answer_whose_client_has_gone_or_that_nobody_rewards_gives_its_place_to_one_of_many(config, clients):
    async with asyncrl.Session(config(), reward=later) as session, asyncrl.Endpoint(session, unrewarded_s=0.0) as endpoint:
        client, pid = await clients(endpoint), await generator_of(session)

        async def held() -> int:
            groups = (await session.run.status()).groups
            return groups["running"] + groups["scoring"] + groups["ready"]

        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as http:
            for is_streamed in (True, False):
                said = {"prompt": "1+1=", "n": 8, "stream": is_streamed}
                task = asyncio.get_running_loop().create_task(asking(http, f"{endpoint.base_url}/completions", said))
                while not await held():
                    await asyncio.sleep(0.01)
                if is_streamed:
                    await (await task).content.readline()
                os.kill(pid, signal.SIGSTOP)  # it must not end before its client has gone
                if is_streamed:
                    (await task).close()
                task.cancel()
                while await held():
                    await asyncio.sleep(0.01)
                os.kill(pid, signal.SIGCONT)
        old = [await client.completions.create(model="m", prompt="1+1=", max_tokens=2) for _ in range(14)]  # of 12 places
        with pytest.raises(openai.APIStatusError, match="not rewarded within 0 s, and others needed its place") as gone:
            await client.post("/rewards", body={"id": old[1].id, "rewards": [1.0]}, cast_to=object)
        assert gone.value.status_code == 410
        for one in old[2:10]:
            endpoint.reward(one.id, [1.0])
        async for groups in endpoint.batches():
            await session.train_step(groups, advantages=[[1.0]] * 4)
            if session.version == 2:
                break
        await session.train_step(await session.generate(["1+1="] * 4, n=1, max_new_tokens=2), advantages=[[1.0]] * 4)
        while endpoint._answers._held:
            await asyncio.sleep(0.05)
        with pytest.raises(asyncrl.RunError, match="too old"):
            endpoint.reward(old[13].id, [1.0])
        others, asked = await session.generate(["1+1="] * 4, n=1, max_new_tokens=2), {"model": "m", "prompt": "1+1=", "n": 2}
        async with asyncio.TaskGroup() as asking_more:  # more than there are connections, of 8 places that are left
            tasks = [asking_more.create_task(client.completions.create(**asked, max_tokens=2)) for _ in range(110)]
        assert [len(task.result().choices) for task in tasks] == [2] * 110
        await session.release(others)
        assert_balanced(await session.run.status())


async def goes_on_where_its_generator_dies(session, endpoint, client):
    told, pid = list[int](), await generator_of(session)
    asked = {"extra_body": {"return_token_ids": True}, "max_tokens": LONG, "stream": True}
    async for part in await client.completions.create(model="any", prompt="1+1=", **asked):
        if not told:
            os.kill(pid, signal.SIGKILL)
        told += part.choices[0].token_ids
    assert len(told) == LONG
    endpoint.reward(part.id, [1.0])
    (member,) = endpoint._answers._held[part.id].group.members
    assert (member.sample.attempt, asyncrl.ids_from_bytes(member.sample.token_ids).tolist()) == (1, told)  # the second attempt
