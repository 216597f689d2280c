"""The engine contract, over every engine; what needs a real model, over transformers and vLLM."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, patch

import pytest
import pytest_asyncio
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.config.learner import LearnerConfig, LoRAConfig, ScratchModel
from asyncrl.config.run import RunConfig
from asyncrl.errors import BroadcastError, EngineDied, GenerationError
from asyncrl.generate.engine import Engine, EngineRequest
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.learner.model.policy import open_policy, publishable_tensors
from asyncrl.models.layout import make_manifest, view_tensors
from asyncrl.models.logprobs import token_logprobs
from asyncrl.weights.tensors import MappedTensors
from tests.contract.engine_cases import (
    END,
    PROMPT,
    SLOTS,
    VOCABULARY,
    Completion,
    assert_holds,
    collect,
    collect_all,
    fake_engine,
    kept_logprobs,
    make_model,
    make_request,
    reference_logits,
    reference_logprobs,
    started,
    tensors_of,
    transformers_engine,
    update_in_flight,
)
from tests.contract.engines.conftest import WITH_VLLM

pytestmark = pytest.mark.asyncio(loop_scope="session")

VLLM = pytest.param("vllm", marks=WITH_VLLM)
LONG = 240
"""Tokens of a completion that is still under way when a test does something to it: a quarter of a second, or an eighth."""


@pytest_asyncio.fixture(loop_scope="session", params=["transformers", VLLM])
async def model_engine(request: pytest.FixtureRequest, model_folder: Path, vllm_engines):
    """An engine that holds a real model: `model_folder`'s."""
    if request.param == "vllm":
        yield await vllm_engines.like_new(model_folder)
    else:
        async with transformers_engine(model_folder) as made:
            yield made


@pytest_asyncio.fixture(loop_scope="session", params=["transformers", "fake", VLLM])
async def engine(request: pytest.FixtureRequest, model_folder: Path, vllm_engines):
    if request.param == "vllm":
        yield await vllm_engines.like_new(model_folder)
    else:
        async with fake_engine() if request.param == "fake" else transformers_engine(model_folder) as made:
            yield made


def assert_same(engine: Engine, ours: list[Completion], theirs: list[Completion]) -> None:
    """Bit for bit, or, where the shape of a batch moves the last bits of its logprobs (vLLM), within 1e-5."""
    if isinstance(engine, VLLMEngine):
        for one, other in zip(ours, theirs, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        theirs = [replace(other, logprobs=one.logprobs) for one, other in zip(ours, theirs, strict=True)]
    assert ours == theirs


def crowd(num: int) -> list[EngineRequest]:
    prompts = [tuple((i + j) % VOCABULARY for j in range(1 + 9 * i % 80)) for i in range(num)]
    return [make_request(f"other{i}", 100 + i, prompt, max_new_tokens=5 + 7 * i % 40) for i, prompt in enumerate(prompts)]


# -- every engine --------------------------------------------------------------------------------------------------------


async def test_completion_has_a_logprob_and_a_version_for_every_token(engine: Engine) -> None:
    assert (engine.version, (await collect(engine.submit(make_request("before", max_new_tokens=3)))).versions) == (-1, [-1] * 3)
    await engine.load_weights(0, tensors_of(make_model(0)), "keep")
    completion = await collect(engine.submit(make_request("a", max_new_tokens=12)))
    assert len(completion.token_ids) == 12
    assert completion.versions == [0] * 12
    assert all(logprob <= 0 for logprob in completion.logprobs)
    assert completion.finish_reason == "length"
    assert engine.num_running == 0


async def test_slots_are_refilled_until_every_request_is_done_and_one_in_a_crowd_says_what_it_says_alone(engine: Engine) -> None:
    request = make_request("a", seed=3, max_new_tokens=40)
    alone = await collect(engine.submit(request))
    requests = [*crowd(5 * SLOTS), request]
    completions = await collect_all(engine, requests)
    assert [len(c.token_ids) for c in completions] == [r.sampling.max_new_tokens for r in requests]
    assert engine.num_running == 0
    assert_same(engine, completions[-1:], [alone])


def alike() -> list[EngineRequest]:
    """Of several lengths, two of each prompt, in one group, more than there are slots: what is equal is computed once."""
    begin = tuple((7 * j) % VOCABULARY for j in range(150))
    prompts = [(*begin[: 150 - 30 * (i // 2 % 3)], *range(i // 2 + 1)) for i in range(3 * SLOTS)]
    return [make_request(f"r{i}", i, prompt, f"g{i // 2 % 4}", max_new_tokens=4 + 3 * i % 20) for i, prompt in enumerate(prompts)]


def of_one_length(num_tokens: int) -> list[EngineRequest]:
    return [make_request(f"r{i}", i, tuple((i * j) % VOCABULARY for j in range(1, num_tokens + 1))) for i in range(SLOTS)]


@pytest.mark.parametrize("requests", [alike(), of_one_length(1), of_one_length(40)], ids=["alike", "1 token", "40 tokens"])
async def test_prompts_that_begin_together_lose_no_bit_by_it(engine: Engine, requests: list[EngineRequest]) -> None:
    alone = [await collect(engine.submit(request)) for request in requests[:: SLOTS - 1]]
    together = await collect_all(engine, requests)
    assert_same(engine, together[:: SLOTS - 1], alone)


async def test_abort_ends_the_stream_keeps_earlier_tokens_and_frees_the_id(engine: Engine) -> None:
    request = make_request("a", max_new_tokens=LONG)
    whole = await collect(engine.submit(request))
    for is_running in (False, True):
        stream = engine.submit(request)
        if is_running:
            await engine.pause()
            await engine.resume()
        engine.abort("a")
        engine.abort("unknown")
        aborted = await collect(stream)
        assert aborted.finish_reason == "abort"
        assert aborted.token_ids == whole.token_ids[: len(aborted.token_ids)]
        assert engine.num_running == 0


async def test_paused_engine_generates_nothing_and_goes_on_where_it_stopped(engine: Engine) -> None:
    requests = [make_request(f"r{i}", seed=i, max_new_tokens=LONG) for i in range(SLOTS + 2)]
    undisturbed = await collect_all(engine, requests)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(collect(engine.submit(request))) for request in requests]
        await asyncio.sleep(0)
        await engine.pause()
        await engine.score([1, 2, 3])
        assert engine.num_running == len(requests)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(running[0]), 0.1)
        await engine.resume()
    assert_same(engine, [task.result() for task in running], undisturbed)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_versions_never_decrease_when_weights_change_in_flight(engine: Engine, kv) -> None:
    weights = [tensors_of(make_model(version)) for version in range(4)]
    await engine.load_weights(0, weights[0], kv)
    async with asyncio.TaskGroup() as tasks:
        requests = [make_request(f"r{i}", seed=i, max_new_tokens=LONG) for i in range(2 * SLOTS)]
        running = [tasks.create_task(collect(engine.submit(request))) for request in requests]
        await asyncio.sleep(0)
        for version in range(1, 4):
            assert await engine.load_weights(version, weights[version], kv) >= 0
            assert engine.version == version
    completions = [task.result() for task in running]
    assert all(c.versions == sorted(c.versions) for c in completions)
    assert all(len(c.token_ids) == LONG for c in completions)
    assert completions[-1].versions == [3] * LONG


@pytest.mark.parametrize(("request_", "expected"), [
    (make_request("a", prompt=()), "no prompt tokens"),
    (make_request("a", prompt=(5, VOCABULARY)), "token id 64 is outside the vocabulary: allowed are 0 to 63"),
    (make_request("a", prompt=(-1,)), "token id -1 is outside the vocabulary"),
    (make_request("a", prompt=(5,) * 200, max_new_tokens=57), r"200 tokens plus max_new_tokens 57 is 257, over .*\(256\)"),
    (make_request("a", max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
    (make_request("running"), "running already"),
])  # fmt: skip
async def test_bad_request_is_refused_with_the_numbers(engine: Engine, request_: EngineRequest, expected: str) -> None:
    stream = engine.submit(make_request("running"))
    with pytest.raises(GenerationError, match=expected):
        engine.submit(request_)
    await collect(stream)
    assert engine.num_running == 0


async def test_close_ends_every_stream_with_abort(engine: Engine) -> None:
    if isinstance(engine, VLLMEngine):
        pytest.skip("closes an engine that others need: see test_vllm_parallel.py")
    streams = [engine.submit(make_request(f"r{i}", max_new_tokens=LONG)) for i in range(2 * SLOTS)]
    await engine.close()
    completions = [await collect(stream) for stream in streams]
    assert {c.finish_reason for c in completions} == {"abort"}
    with pytest.raises(GenerationError, match="closed"):
        engine.submit(make_request("late"))


# -- with a real model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{"temperature": 1.3, "top_p": 0.8}, {"temperature": 0.9, "top_k": 12, "top_p": 0.6}])
async def test_behaviour_logprobs_are_those_of_a_plain_forward(model_engine, sampling) -> None:
    prompts = [tuple(range(2, 3 + 11 * i)) for i in range(SLOTS + 1)]
    requests = [make_request(f"r{i}", i, prompt, max_new_tokens=40, **sampling) for i, prompt in enumerate(prompts)]
    completions = await collect_all(model_engine, requests)
    model = make_model(0)
    for request, completion in zip(requests, completions, strict=True):
        logits = reference_logits(model, request.prompt_ids, completion.token_ids) / sampling["temperature"]
        expected = [
            slow_filtered_logprob(row, token, sampling.get("top_k", 0), sampling["top_p"])
            for row, token in zip(logits.double(), completion.token_ids, strict=True)
        ]
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


def slow_filtered_logprob(logits: torch.Tensor, token: int, top_k: int, top_p: float) -> float:
    """One position, the long way: sort, keep k, keep the head of mass p, renormalise."""
    order = logits.argsort(descending=True).tolist()
    kept = order[:top_k] if top_k else order
    weights = {i: float(torch.exp(logits[i] - logits.max())) for i in kept}
    total, mass, nucleus = sum(weights.values()), 0.0, []
    for i in kept:
        if mass >= top_p * total:
            break
        nucleus.append(i)
        mass += weights[i]
    assert token in nucleus
    return float(torch.log(torch.tensor(weights[token] / sum(weights[i] for i in nucleus), dtype=torch.float64)))


async def test_temperature_zero_is_greedy_with_logprob_zero(model_engine) -> None:
    completion = await collect(model_engine.submit(make_request("a", temperature=0.0, max_new_tokens=15)))
    assert completion.token_ids == reference_logits(make_model(0), PROMPT, completion.token_ids).argmax(-1).tolist()
    assert completion.logprobs == [0.0] * 15


async def test_recompute_gives_the_logprobs_of_a_fresh_forward_under_the_new_weights(model_engine) -> None:
    completions, new = await update_in_flight(model_engine, "recompute")
    for request, completion in completions:
        reference = reference_logprobs(new, request.prompt_ids, completion.token_ids)
        first = completion.versions.index(1)
        assert completion.logprobs[first:] == pytest.approx(reference[first:], abs=1e-5)


async def test_keep_goes_on_over_the_keys_and_values_of_the_old_weights(model_engine) -> None:
    completions, new = await update_in_flight(model_engine, "keep")
    old = make_model(0)
    for request, completion in completions:
        first = completion.versions.index(1)
        if first == 0:
            continue
        expected = kept_logprobs(old, new, request.prompt_ids, completion.token_ids, first)
        assert completion.logprobs[first:] == pytest.approx(expected, abs=1e-5)
        fresh = reference_logprobs(new, request.prompt_ids, completion.token_ids)[first:]
        assert completion.logprobs[first:] != pytest.approx(fresh, abs=1e-3)


async def test_stop_ids_end_a_completion_and_are_part_of_it(model_engine) -> None:
    free = await collect(model_engine.submit(make_request("a", max_new_tokens=60)))
    stop = free.token_ids[7]
    stopped = await collect(model_engine.submit(make_request("b", max_new_tokens=60, ignore_eos=False, stop_token_ids=(stop,))))
    end = min(free.token_ids.index(i) for i in (stop, END) if i in free.token_ids)
    assert stopped.token_ids == free.token_ids[: end + 1]
    assert stopped.finish_reason == "stop"


async def test_weights_that_do_not_fit_leave_the_old_ones_whole(model_engine) -> None:
    before = await model_engine.score([3, 4, 5, 6])
    good = tensors_of(make_model(1))
    name = "model.layers.1.mlp.up_proj.weight"
    bad = {
        "lack": {key: tensor for key, tensor in good.items() if key != name},
        "does not have": {**good, "model.extra.weight": torch.zeros(2)},
        "shape": {**good, name: torch.zeros(3, 3)},
        "differ": {**good, "lm_head.weight": good["model.embed_tokens.weight"] + 1},
    }
    for message, tensors in bad.items():
        with pytest.raises(GenerationError, match=message):
            await model_engine.load_weights(1, tensors, "keep")
        assert model_engine.version == -1
        assert await model_engine.score([3, 4, 5, 6]) == before


async def test_non_finite_logits_fail_the_request_and_not_the_engine(model_engine) -> None:
    if isinstance(model_engine, VLLMEngine) and torch.cuda.is_available():
        pytest.skip("on a GPU vLLM's sampler then returns a token that does not exist, and the engine ends: docs/vllm.md")
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors_of(make_model(0)).items()}
    await model_engine.load_weights(1, broken, "keep")
    with pytest.raises(GenerationError, match="non-finite logits under version 1"):
        await collect(model_engine.submit(make_request("a", prompt=(3,) * 100)))
    new = make_model(1)
    await model_engine.load_weights(2, dict(new.state_dict()), "keep")  # a tied head may come under both of its names
    await collect_all(model_engine, [make_request("in its place"), make_request("long", prompt=(3,) * 200)])
    await assert_holds(model_engine, new)


async def test_a_decode_thread_that_failed_ends_every_stream_and_every_later_call(model_folder: Path) -> None:
    async with transformers_engine(model_folder) as engine:
        streams = [engine.submit(make_request(f"r{i}", max_new_tokens=250)) for i in range(SLOTS + 1)]
        for call in (engine.load_weights(1, {"model.norm.weight": None}, "keep"), *map(collect, streams), engine.pause()):
            with pytest.raises(EngineDied, match="the decode loop failed: AttributeError"):
                await call
        for later in (lambda: engine.submit(make_request("late")), lambda: engine.num_slots):
            with pytest.raises(EngineDied, match="the decode loop failed"):
                later()
        assert engine.num_running == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_requests_that_outlast_a_crowd_lose_no_bit_where_fewer_rows_are_run(model_folder: Path, dtype) -> None:
    sampling = [{}, {"temperature": 0.0}, {"top_k": 5, "temperature": 0.7}, {"top_p": 0.9}]
    requests = [
        make_request(f"r{i}", i, tuple(range(2, 4 + i % 30)), max_new_tokens=90 if i % 13 == 0 else 3 + i % 9, **sampling[i % 4])
        for i in range(96)
    ]
    long = [request for request in requests if request.sampling.max_new_tokens == 90]
    async with transformers_engine(model_folder, 96, dtype=dtype) as engine:
        alone = [await collect(engine.submit(request)) for request in long]
        together = await collect_all(engine, requests)
    assert [found for found, request in zip(together, requests, strict=True) if request in long] == alone


async def test_sliding_window_shorter_than_the_sequences_is_refused(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, use_sliding_window=True, sliding_window=16, max_window_layers=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(GenerationError, match="sliding window of 16 tokens"):
        async with transformers_engine(tmp_path):
            pass


# -- what is built alike at the learner and in the engine ----------------------------------------------------------------


def at_learner(policy, prompt: tuple[int, ...], token_ids: list[int], temperature: float) -> list[float]:
    """Score a completion as the learner does: hidden states, then the output layer over chunks."""
    ids = torch.tensor([*prompt, *token_ids])
    with torch.no_grad():
        hidden = policy.base_model(input_ids=ids[:-1][None], use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
        head = policy.get_output_embeddings()
        return token_logprobs(hidden, ids[len(prompt) :], head, temperature=temperature, chunk_tokens=7)[0].tolist()


def learner_folder(tmp_path: Path, dtype: torch.dtype, **shape) -> Path:
    """A model with a tokenizer beside it, which the learner wants to see."""
    make_model(0, **shape).to(dtype).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@asynccontextmanager
async def for_adapters(shared: VLLMEngine, folder: Path, lora: LoRAConfig):
    """Have another engine, made for adapters, drive the vLLM of one that is idle; vLLM itself knows nothing of them."""
    with patch.multiple(shared.backend, start=AsyncMock(), close=AsyncMock()):
        async with started(VLLMEngine(shared.backend, folder, lora=lora)) as engine:
            yield engine


@pytest.mark.parametrize("kind", ["transformers", VLLM])
async def test_adapters_alone_come_in_flight_and_agree_with_the_learner(tmp_path, model_folder, vllm_engines, kind: str) -> None:
    lora, folder = LoRAConfig(rank=4), learner_folder(tmp_path, torch.float32)
    policy = open_policy(RunConfig(learner=LearnerConfig(lora=lora), seed=5), folder).eval()
    adapters = publishable_tensors(policy)
    if kind == "vllm":
        made = for_adapters(await vllm_engines.like_new(model_folder), folder, lora)
    else:
        made = transformers_engine(folder, lora=lora)
    async with made as engine:
        await engine.load_weights(0, {name: tensor.detach().clone() for name, tensor in adapters.items()}, "keep")
        await assert_holds(engine, policy)
        stream = engine.submit(make_request("in flight", max_new_tokens=LONG))
        first = await anext(stream)
        torch.manual_seed(3)
        with torch.no_grad():
            for tensor in adapters.values():
                tensor.add_(torch.randn_like(tensor) * 0.05)
        await engine.load_weights(1, {name: tensor.detach().clone() for name, tensor in adapters.items()}, "recompute")
        await assert_holds(engine, policy)
        assert set((await collect(stream, first)).versions) == {0, 1}
        for temperature in (1.0, 0.7):
            drawn = await collect(engine.submit(make_request("drawn", temperature=temperature)))
            expected = at_learner(policy, PROMPT, drawn.token_ids, temperature)
            assert drawn.logprobs == pytest.approx(expected, abs=1e-5)
        with pytest.raises(GenerationError, match="tensors this model does not have"):
            await engine.load_weights(2, tensors_of(make_model(0)), "keep")
        with pytest.raises(GenerationError, match="lack 1 "):
            await engine.load_weights(2, dict(list(adapters.items())[1:]), "keep")
        await assert_holds(engine, policy)


async def test_with_float32_heads_bfloat16_engine_and_learner_give_the_exact_logprobs_of_their_hidden_states(tmp_path) -> None:
    torch.manual_seed(0)
    folder, token_ids = learner_folder(tmp_path, torch.bfloat16, hidden_size=64), torch.randint(0, VOCABULARY, (200,)).tolist()
    errors = {}
    for fp32_head in (False, True):
        config = RunConfig(model=ScratchModel(fp32_head=fp32_head), learner=LearnerConfig(dtype="bfloat16"))
        policy = open_policy(config, folder)
        async with transformers_engine(folder, fp32_head=fp32_head, dtype="bfloat16") as engine:
            generated = torch.tensor(await engine.score(token_ids))
        trained = torch.tensor(at_learner(policy, tuple(token_ids[:1]), token_ids[1:], 1.0))
        ids = torch.tensor(token_ids)
        with torch.no_grad():  # the output layer taken in float64 over the hidden states the policy has
            hidden = policy.base_model(input_ids=ids[:-1][None], use_cache=False).last_hidden_state[0]
            logits = hidden.double() @ policy.get_output_embeddings().weight.double().T
        exact = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        errors[fp32_head] = [(side - exact).abs().mean().item() for side in (generated, trained)]
    assert max(errors[True]) < 1e-5
    assert min(errors[False]) > 1e-3


async def test_nothing_is_sampled_from_weights_that_were_overwritten_while_they_were_read(model_engine) -> None:
    """The learner took the slot back in the middle: requests in flight stand still until a whole version comes."""
    whole = tensors_of(make_model(1))
    manifest = make_manifest(whole)
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    for name, view in view_tensors(flat, manifest).items():
        view.copy_(whole[name])
    await model_engine.load_weights(1, tensors_of(make_model(0)), "keep")
    stream = model_engine.submit(make_request("a", max_new_tokens=LONG))
    first = await anext(stream)

    def overwritten() -> None:
        raise BroadcastError("overwritten")

    with pytest.raises(BroadcastError, match="overwritten"):
        await model_engine.load_weights(2, MappedTensors(manifest, flat, check=overwritten), "keep")
    assert set(first.versions) == {1}
    with pytest.raises(GenerationError, match=r"no whole weights|came only in part"):
        await model_engine.score([3, 4, 5])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(collect(stream), 0.3)
    await model_engine.load_weights(3, MappedTensors(manifest, flat), "keep")
    assert model_engine.version == 3
    assert len((await collect(model_engine.submit(make_request("b")))).token_ids) == 20
    stream.close()


async def test_weights_may_be_loaded_while_paused(engine: Engine) -> None:
    await engine.pause()
    stream = engine.submit(make_request("a", max_new_tokens=5))
    await engine.load_weights(7, tensors_of(make_model(7)), "keep")
    await engine.resume()
    assert (await collect(stream)).versions == [7] * 5
