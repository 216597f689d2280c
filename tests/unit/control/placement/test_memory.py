"""What cannot fit a device is refused before anything starts, and the sum has everything that is needed."""

import os
import re
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.learner import LearnerConfig
from asyncrl.config.load import parse_config
from asyncrl.control.placement import limits, memory
from asyncrl.errors import ConfigError
from asyncrl.generate.transformers.model import SlotModel
from asyncrl.learner.model.policy import DTYPES
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.models.memory import trained_parts
from asyncrl.residency.plan import gib

GIB = 1 << 30
MODEL = {"kind": "scratch", "hidden_size": 512, "num_layers": 2, "num_heads": 8}
D, F, V = 512, 2048, 64
PARAMETERS = 2 * (4 * D * D + 3 * D * F + 2 * D) + D + V * D


def sums(kind: str = "colocated", **settings: Any) -> dict[str, dict[str, float]]:
    """Return the refused phases of a run with hardly any device, each with its lines in GiB."""
    with pytest.raises(ConfigError) as refused:
        memory.check_phase_room(config(kind, 1e-6, **settings))
    phases = re.split(r"placement: phase '(\w+)' does not fit the device:\n", str(refused.value))[1:]
    return {
        phase: {name: float(size) for name, size in re.findall(r"^  (\S.*?) {2,}([\d.]+) GiB$", said, re.MULTILINE)}
        for phase, said in zip(phases[::2], phases[1::2], strict=True)
    }


def config(kind: str, gib: float, **settings: Any) -> Any:
    medium = {"broadcast": {"medium": {"kind": "shared_storage"}}} if kind == "hybrid" else {}
    return parse_config({
        "model": MODEL, "placement": {"kind": kind, "device_memory_gib": gib}, "buffer": {"max_staleness": 1}, **medium,
        **settings,
    })  # fmt: skip


def test_training_counts_weights_state_gradients_activations_and_logits() -> None:
    train = sums(packing={"tokens_per_row": 1024})["train"]
    weights = PARAMETERS * 4 / GIB
    assert train["policy"] == pytest.approx(weights, abs=1e-4)
    assert train["policy optimizer"] == pytest.approx(2 * weights, abs=1e-4)
    assert train["gradients"] == pytest.approx(weights, abs=1e-4)
    # Two layers of two norms (12 bytes), attention's five and the feed-forward's four widths; the last norm, the hidden states.
    per_token = 2 * (2 * 12 * D + 4 * (5 * D + 4 * F)) + 12 * D + 4 * D
    assert train["activations"] == pytest.approx(1024 * per_token / GIB, abs=1e-4)
    assert train["sum"] == pytest.approx(sum(list(train.values())[: list(train).index("sum")]), abs=5e-4)


def test_a_rollout_counts_the_kv_cache_of_every_generator() -> None:
    engine = {"kind": "transformers", "num_slots": 8, "max_sequence_tokens": 512}
    rollout = sums(generate={"num_workers": 2, "engine": engine})["rollout"]
    assert rollout["KV cache"] == pytest.approx(2 * 2 * 2 * D * 512 * 8 * 4 / GIB, abs=1e-4)
    elastic = {"kind": "local", "elastic": {"min_generators": 1, "max_generators": 6}}
    most = sums(generate={"num_workers": 2, "engine": engine}, launch=elastic)["rollout"]
    assert most["KV cache"] == pytest.approx(3 * rollout["KV cache"], abs=3e-4)
    assert "policy" in sums("hybrid", generate={"num_workers": 2, "engine": engine})["rollout"]


def test_a_workers_reference_that_has_no_room_has_an_advice_of_its_own() -> None:
    learner, worker = ({"algorithm": {"kl": {}, "reference": {"where": where}}} for where in ("learner", "worker"))
    assert "reference" in sums(**learner)["inference"]
    assert "workers' reference" in sums(**worker)["inference"]
    with pytest.raises(ConfigError) as refused:
        memory.check_phase_room(config("colocated", 1e-6, **worker))
    assert "where = " not in str(refused.value)
    assert 'inference.dtype = "bfloat16"' in str(refused.value)


def test_a_learners_own_budget_is_held_to_the_same_sum_of_training() -> None:
    alone, shared = sums("disaggregated"), sums("colocated")
    assert set(alone) == {"train"}
    assert alone["train"] == shared["train"]
    memory.check_phase_room(config("disaggregated", alone["train"]["sum"] + 1e-4))
    memory.check_phase_room(config("disaggregated", 1e-6, learner={"kind": "external"}))


# -- generation beside training ------------------------------------------------------------------------------------------


def beside(device: str = "cpu", engine: dict | None = None, **placement: object):
    engine = engine or {"kind": "transformers", "device": device}
    return parse_config({
        "placement": {"kind": "async_hybrid", **placement},
        "model": {"kind": "scratch", "hidden_size": 128, "num_layers": 4, "max_positions": 512},
        "generate": {"num_workers": 2, "engine": engine},
        "learner": {"device": device},
    })  # fmt: skip


def test_a_joining_generator_is_held_to_a_share_on_the_runs_own_machine_only():
    config = beside("cuda", device_memory_gib=8.0, generation_share=0.5)
    assert memory.memory_bounds(limits.as_joined(config, on_same_machine=True)) == (0.25, 0.5, 8 << 30)
    assert memory.memory_bounds(limits.as_joined(config, on_same_machine=False)) == (1.0, 1.0, 0)
    before = os.sched_getaffinity(0)
    limits.keep_to_own_cores(limits.as_joined(beside(), on_same_machine=False))
    assert os.sched_getaffinity(0) == before


def test_what_does_not_fit_is_refused_with_the_sum_and_a_share_that_does_not_divide_it_with_one_that_does():
    with pytest.raises(ConfigError, match=r"do not fit the device(.|\n)*training state(.|\n)*2 x \(weights .*KV cache"):
        memory.check_shares(beside(device_memory_gib=0.01))
    with pytest.raises(ConfigError, match=r"set it between 0\.\d\d and 0\.\d\d") as refused:
        memory.check_shares(beside(device_memory_gib=1.0, generation_share=0.99))
    least = float(str(refused.value).rsplit("between ", 1)[1][:4])
    memory.check_shares(beside(device_memory_gib=1.0, generation_share=max(least, 0.5)))


def test_the_memory_that_is_asked_for_is_enough():
    with pytest.raises(ConfigError, match=r"at least \d+\.\d+ GiB") as refused:
        memory.check_shares(beside(device_memory_gib=0.01))
    memory.check_shares(beside(device_memory_gib=float(re.search(r"at least (\S+) GiB", str(refused.value))[1])))
    for num_bytes in (1, 4_831_838, 5_000_000):
        assert float(gib(num_bytes, up=True).split()[0]) * 2**30 >= num_bytes


def test_vllm_gets_its_share_as_kv_cache_under_a_budget_and_as_a_share_of_the_gpu_without():
    engine = {"kind": "vllm", "device": "cpu", "max_sequence_tokens": 512}
    config = beside(engine=engine, device_memory_gib=2.0, generation_share=0.5)
    weights_gib = memory.least_parts(config)[0].num_bytes / 2**30
    assert memory.with_own_memory(config).generate.engine.kv_cache_gib == pytest.approx(0.5 - weights_gib)
    on_gpu = beside("cuda", engine={"kind": "vllm", "device": "cuda", "max_sequence_tokens": 512}, generation_share=0.5)
    assert memory.with_own_memory(on_gpu).generate.engine.gpu_memory_share == 0.25
    assert memory.with_own_memory(parse_config({})) == parse_config({})


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_engine_of_several_gpus_holds_a_part_on_each_and_one_in_host_memory_holds_all_there(device):
    def made(**ranks):
        engine = {"kind": "vllm", "device": device, "dtype": "float32", "max_sequence_tokens": 512} | ranks
        return beside(device, engine=engine, device_memory_gib=2.0, generation_share=0.5)

    def least(**ranks):
        return [part.num_bytes for part in memory.least_parts(made(**ranks))]

    weights, cache = least()
    parts = 4 if device == "cuda" else 1
    copies = 1 if device == "cuda" else 3
    assert least(tensor_parallel=4) == [weights // parts, cache // parts]
    assert least(data_parallel=3) == [copies * weights, cache]
    held_gib = memory.with_own_memory(made(tensor_parallel=4)).generate.engine.kv_cache_gib
    assert held_gib == pytest.approx(0.5 - weights / parts / GIB)
    assert memory.generator_parts(made(data_parallel=3))[0].num_bytes == 3 * weights


def test_inference_workers_on_the_same_device_and_a_rows_activations_are_in_the_sum():
    def said(**settings: object) -> str:
        with pytest.raises(ConfigError) as refused:
            memory.check_shares(parse_config(msgspec.to_builtins(beside(device_memory_gib=0.001)) | settings))
        return str(refused.value)

    reference = {"algorithm": {"kl": {}, "reference": {"where": "worker"}}}
    assert "activations 0." in said()
    assert "inference workers" not in said()
    assert "inference workers 0." in said(**reference)
    assert "inference workers" not in said(**reference, inference={"device": "cuda"})


@pytest.mark.parametrize(("medium", "num_versions"), [("cuda_ipc", 2), ("auto", 2), ("shared_memory", 0)])
def test_versions_that_engines_fetch_from_the_learners_gpu_are_in_the_sum(medium, num_versions):
    settings = msgspec.to_builtins(beside("cuda", device_memory_gib=0.001)) | {"broadcast": {"medium": {"kind": medium}}}
    made = parse_config(settings)
    with pytest.raises(ConfigError) as refused:
        memory.check_shares(made)
    told = re.search(r"weight versions to fetch ([0-9.]+) GiB", str(refused.value))
    assert (0.0 if told is None else float(told[1])) == pytest.approx(num_versions * memory.version_bytes(made) / GIB, abs=1e-3)
    assert (told is not None) == bool(num_versions)


# -- against real models and optimizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "longest"), [(1, 16), (9, 17), (31, 63), (33, 65), (64, 128)])
def test_the_kv_cache_in_the_sum_is_that_of_the_engine(slots, longest):
    engine = {"kind": "transformers", "num_slots": slots, "max_sequence_tokens": longest}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=1, **sizes))
    made = parse_config({
        "model": {"kind": "scratch", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_positions": 128},
        "generate": {"engine": engine, "sampling": {"max_new_tokens": 4}},
    })  # fmt: skip
    cache = SlotModel(model, made.generate.engine, adapters_only=False).cache
    key = torch.zeros(1, 1, 1, 8)
    cache.write(0, torch.tensor([0]), key, key)
    assert memory.generator_parts(made)[1].num_bytes == cache.num_bytes


@pytest.mark.parametrize(("dtype", "offload", "optimizer"), [
    ("float32", False, "adamw"), ("bfloat16", True, "adamw"), ("float16", False, "adamw_8bit"), ("float32", True, "adamw_8bit"),
])  # fmt: skip
def test_state_is_that_of_the_optimizer(dtype, offload, optimizer):
    config = LearnerConfig(dtype=dtype, offload_optimizer=offload, optimizer=optimizer)
    layer = torch.nn.Linear(512, 512, bias=False, dtype=DTYPES[dtype])
    made = PolicyOptimizer(layer.named_parameters(), config, 10)
    made.backward(layer(torch.ones(1, 512, dtype=DTYPES[dtype])).float().sum())
    (master,) = made._masters.values()
    held = {"weights": layer.weight.nbytes, "gradients": master.gradient.nbytes}
    made.clip()
    made.step(0)
    state = dict(made.named_state())
    names = ("exp_avg/", "exp_avg_sq/", "state1/", "state2/")
    moments = sum(tensor.nbytes for name, tensor in state.items() if name.startswith(names))
    masters = sum(tensor.nbytes for name, tensor in state.items() if name.startswith("master/"))
    held |= {"masters": masters, "moments": moments}
    parts = trained_parts(layer.weight.numel(), 0, config)
    assert {part.name.split()[-1]: part.num_bytes for part in parts} == {name: size for name, size in held.items() if size}
    assert {part.place for part in parts if part.name.split()[-1] in {"masters", "moments"}} == {"host" if offload else "device"}
