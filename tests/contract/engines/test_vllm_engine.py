"""What only vLLM can get wrong: its processes, its workers' copies of the weights, its queues, its prefix cache."""

import asyncio
import os
import signal
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig, PreTrainedConfig, PreTrainedModel

from asyncrl.errors import BroadcastError, EngineConfigError, EngineDied, GenerationError
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.generate.vllm.launch import installed_version
from asyncrl.generate.vllm.worker_extension import _load_layerwise, is_plainly_loaded
from asyncrl.models.layout import make_manifest, view_tensors
from asyncrl.weights.tensors import MappedTensors
from tests.contract.engine_cases import (
    PROMPT,
    SLOTS,
    VOCABULARY,
    assert_holds,
    collect,
    make_model,
    make_request,
    reference_logprobs,
    tensors_of,
)
from tests.contract.engines.conftest import ONE_PROCESS, STEP_TOKENS, WITH_VLLM, deferred, is_gone, vllm_engine

pytestmark = [pytest.mark.asyncio(loop_scope="session"), *WITH_VLLM]

LARGE_STEPS = {"vocab_size": VOCABULARY, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}


def other_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def named_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


@pytest_asyncio.fixture(loop_scope="session")
async def engine(vllm_engines, model_folder: Path):
    return await vllm_engines.like_new(model_folder)


def in_a_file(tensors: Mapping[str, torch.Tensor], folder: Path) -> MappedTensors:
    """Tensors as the learner's slot would hold them: somewhere inside a file."""
    offset, manifest = 4096, make_manifest(tensors)
    path, size = folder / "slot", offset + manifest.total_bytes
    path.write_bytes(bytes(size))
    flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)[offset:]
    for name, view in view_tensors(flat, manifest).items():
        view.copy_(tensors[name])
    return MappedTensors(manifest, flat, str(path), offset)


async def test_bytes_in_a_mapped_file_are_cast_to_the_engines_own_dtype(engine: VLLMEngine, tmp_path: Path) -> None:
    new = make_model(3)
    with torch.no_grad():  # not new.to(bfloat16): it would round the rotary frequencies too
        for parameter in new.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    sent = {name: tensor.to(torch.bfloat16) for name, tensor in tensors_of(new).items()}
    await engine.load_weights(3, in_a_file(sent, tmp_path), "keep")
    await assert_holds(engine, new)


async def test_a_fetch_that_breaks_off_stops_sampling_until_a_whole_version_came_and_one_that_brings_nothing_does_not(
    engine, tmp_path
) -> None:
    gone = in_a_file(tensors_of(make_model(1)), tmp_path)
    os.unlink(gone.path)
    broken = deferred(tensors_of(make_model(4)), tmp_path, "half")
    for tensors, said in ((gone, "cannot be mapped"), (broken, "the sender is gone")):
        assert engine.has_weights
        with pytest.raises(BroadcastError, match=said):
            await engine.load_weights(1, tensors, "keep")
        assert engine.version == -1
    assert not engine.has_weights
    async with asyncio.TaskGroup() as tasks:
        held = tasks.create_task(collect(engine.submit(make_request("held"))))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(held), 0.3)
        new = make_model(5)
        await engine.load_weights(2, deferred(tensors_of(new), tmp_path), "keep")
    assert held.result().versions == [2] * 20
    await assert_holds(engine, new)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what vLLM imports is
async def test_only_a_model_whose_weights_are_used_as_they_are_loaded_is_loaded_plainly():
    method_of = {"linear": "UnquantizedLinearMethod", "vocab_parallel_embedding": "UnquantizedEmbeddingMethod"}
    model = torch.nn.Module()
    for place, name in method_of.items():
        layer = torch.nn.Module()
        layer.quant_method = getattr(import_module(f"vllm.model_executor.layers.{place}"), name)()
        model.add_module(place, layer)
    assert is_plainly_loaded(model)
    model.linear.process_weights_after_loading = lambda _: None  # as layers of MLA have
    assert not is_plainly_loaded(model)
    del model.linear.process_weights_after_loading
    model.linear.quant_method = object()  # another one: quantised, or of a mixture
    assert not is_plainly_loaded(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what vLLM imports is
async def test_a_rank_whose_part_of_the_vocabulary_is_padding_only_misses_nothing(monkeypatch) -> None:
    place, config = "vllm.model_executor.layers.vocab_parallel_embedding", import_module("vllm.config")
    vocabulary, reload = import_module(place), import_module("vllm.model_executor.model_loader.reload")
    monkeypatch.setattr(vocabulary, "get_tensor_model_parallel_world_size", lambda: 2)
    model = torch.nn.Module()
    with config.set_current_vllm_config(config.VllmConfig()):
        for rank in (0, 1):
            monkeypatch.setattr(vocabulary, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            model.add_module(f"rank{rank}", vocabulary.VocabParallelEmbedding(14, 8, params_dtype=torch.float32))
        reload.record_metadata_for_reloading(model)

        def load_weights(named):
            for name, tensor in named:
                parameter = model.get_parameter(name)
                parameter.weight_loader(parameter, tensor)

        model.load_weights = load_weights
        worker = SimpleNamespace(model_runner=SimpleNamespace(model_config=None))
        new = torch.arange(14.0 * 8).view(14, 8)
        for given, missed in ((("rank0", "rank1"), set()), (("rank1",), {"rank0.weight"})):
            named = iter([(f"{name}.weight", new) for name in given])
            assert _load_layerwise(worker, model, named, torch.device("cpu"))[1] == missed
    assert torch.equal(model.rank0.weight[:14], new)


async def test_settings_that_vllm_refuses_are_fatal(model_folder: Path) -> None:
    for settings, said in (
        (
            {"arguments": {"max_num_batched_tokens": 8}},
            r"vLLM refuses generate.engine, or its arguments: .*max_num_batched_tokens",
        ),
        ({"arguments": {"nonsense": 1}}, "arguments: vLLM's AsyncEngineArgs has no nonsense"),
        *([] if torch.cuda.is_available() else [({"sleep": True}, "sleep needs a GPU")]),
    ):
        with pytest.raises(EngineConfigError, match=said):
            async with vllm_engine(model_folder, **settings):
                pass


async def test_prompts_that_are_more_than_a_step_takes_all_complete(engine, model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    prompts = [tuple((2 + number + place) % VOCABULARY for place in range(100)) for number in range(SLOTS)]
    assert sum(map(len, prompts)) > STEP_TOKENS
    streams = [engine.submit(make_request(f"long-{number}", prompt=prompt)) for number, prompt in enumerate(prompts)]
    for prompt, stream in zip(prompts, streams, strict=True):
        held = await collect(stream)
        assert held.logprobs == pytest.approx(reference_logprobs(model, prompt, held.token_ids), abs=1e-5)


async def test_versions_are_exact_to_the_token_over_many_quick_updates(engine: VLLMEngine) -> None:
    """vLLM's own spans are compared inside the engine: one token stamped wrong would fail its request."""
    models = {version: make_model(version) for version in range(4)}
    async with asyncio.TaskGroup() as tasks:
        requests = [make_request(f"r{i}", i, max_new_tokens=100) for i in range(6)]
        running = [tasks.create_task(collect(engine.submit(request))) for request in requests]
        for version in range(8):
            await engine.load_weights(version, tensors_of(models[version % 4]), "recompute")
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
    new = make_model(1)
    await engine.load_weights(1, tensors_of(new), "keep")
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
    # What the engine gives vLLM for a member, to see what vLLM says about it.
    salted = {"type": "token", "prompt_token_ids": list(prompt), "cache_salt": f"{engine._mark}-{engine._num_loads}"}
    params = import_module("vllm").SamplingParams(max_tokens=2)
    *_, last = [output async for output in engine.backend.llm.generate(salted, params, "by-hand")]
    assert last.num_cached_tokens >= 96


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


async def test_a_killed_engine_core_fails_every_stream_and_every_later_call(engine: VLLMEngine) -> None:
    """Last of those that share this engine."""
    core = next(process for process in engine.backend.processes if process.ppid() == os.getpid())
    streams = [engine.submit(make_request(f"r{i}", i, max_new_tokens=200)) for i in range(8)]
    await anext(streams[0])
    core.send_signal(signal.SIGKILL)
    for stream in streams[-3:]:  # those before may be done, where this process stood still
        with pytest.raises(GenerationError, match="vLLM"):
            await asyncio.wait_for(collect(stream), 100)
    with pytest.raises(EngineDied, match="died"):
        engine.submit(make_request("late"))
    with pytest.raises(EngineDied, match="died"):
        assert engine.num_slots, "asked twice a second by an idle generator, which so ends"
    with pytest.raises(GenerationError, match="died"):
        await engine.load_weights(1, tensors_of(make_model(0)), "keep")
    await engine.close()
    assert all(map(is_gone, engine.backend.processes))
    assert not engine.backend.sockets.path.exists()


# -- other engines -------------------------------------------------------------------------------------------------------


async def test_new_weights_come_into_a_tied_head_that_the_model_skips_and_twenty_of_them_take_no_memory(tmp_path: Path) -> None:
    """Large enough for a leaked copy to show."""
    config = GPT2Config(**LARGE_STEPS | {"initializer_range": 0.06}, n_embd=384, n_layer=2, n_head=12, n_positions=256)
    old, new = (other_model(config, seed) for seed in (0, 1))
    model_bytes = sum(parameter.nbytes for parameter in new.parameters())
    old.save_pretrained(tmp_path)
    resident = []
    async with vllm_engine(tmp_path, **ONE_PROCESS) as engine:
        for version in range(25):
            streams = [engine.submit(make_request(f"v{version}.{i}", i, max_new_tokens=4)) for i in range(4)]
            model = old if version % 2 else new
            await engine.load_weights(version, named_parameters(model), "recompute")
            for stream in streams:
                await collect(stream)
            if version < 2:
                await assert_holds(engine, model, abs_error=1e-4)
            resident.append(sum(process.memory_info().rss for process in engine.backend.processes))
    # An allocator at rest scatters by two models of this size; a quarter of a model left at each update would be five.
    assert resident[-1] - resident[4] < 5 * model_bytes


async def test_a_model_that_writes_past_vllms_reload_is_refused_and_samples_nothing(tmp_path: Path) -> None:
    """vLLM's own account says that GPT-OSS loaded everything; its experts and sinks keep their old values."""
    if installed_version().release == (0, 27):
        pytest.skip("vLLM 0.27 runs no mixture in float32 on processors with AMX")
    config = GptOssConfig(
        **LARGE_STEPS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = other_model(config, 0)
    model.save_pretrained(tmp_path)
    async with vllm_engine(tmp_path, **ONE_PROCESS) as engine:
        with pytest.raises(GenerationError, match=r"vLLM did not load \d+ of its parameters: model\.layers\.0\."):
            await engine.load_weights(0, named_parameters(model), "keep")
        with pytest.raises(GenerationError, match="came only in part"):
            await engine.score([2, 3, 4])
