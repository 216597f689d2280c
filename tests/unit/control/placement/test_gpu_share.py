"""What a share of the device means: cores, memory sums, environment."""

import json
import os
import subprocess
import sys

import msgspec
import pytest

from asyncrl.config.load import parse_config
from asyncrl.control.placement import gpu_share
from asyncrl.errors import ConfigError

BURN = """
import hashlib, json, sys, threading, time
from asyncrl.config.load import parse_config
from asyncrl.control.placement.gpu_share import keep_to_own_cores
cores = keep_to_own_cores(parse_config({"placement": {"kind": "async_hybrid"}}))
block, end = bytes(1 << 20), time.monotonic() + 0.5
def burn():
    while time.monotonic() < end:
        hashlib.sha256(block).digest()
before, began = time.process_time(), time.monotonic()
threads = [threading.Thread(target=burn) for _ in range(4 * len(cores))]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(json.dumps([len(cores), (time.process_time() - before) / (time.monotonic() - began)]))
"""


def _config(device: str = "cpu", engine: dict | None = None, **placement: object):
    engine = engine or {"kind": "transformers", "device": device}
    return parse_config({
        "placement": {"kind": "async_hybrid", **placement},
        "model": {"kind": "scratch", "hidden_size": 128, "num_layers": 4, "max_positions": 512},
        "generate": {"num_workers": 2, "engine": engine},
        "learner": {"device": device},
    })  # fmt: skip


def test_a_share_is_rounded_down_to_whole_cores():
    assert gpu_share.own_cores(0.5, {4, 7}) == gpu_share.own_cores(0.99, {4, 7}) == {7}
    assert gpu_share.own_cores(0.5, range(64), quota=2.0) == {63}  # a container that may use two cores' time
    for share in (0.25, 0.3):
        with pytest.raises(ConfigError, match=rf"{share:g} of 2 cores is .* at least 0.50"):
            gpu_share.own_cores(share, {4, 7})


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="half of one core is no core")
def test_however_many_threads_a_generator_starts_it_takes_no_more_time_than_its_cores_have():
    told = subprocess.run([sys.executable, "-c", BURN], capture_output=True, text=True, timeout=60, check=True).stdout
    num_cores, cores_used = json.loads(told)
    assert num_cores == len(os.sched_getaffinity(0)) // 2
    assert cores_used <= 1.1 * num_cores


def test_a_joining_generator_is_held_to_a_share_on_the_runs_own_machine_only():
    config = _config("cuda", device_memory_gib=8.0, generation_share=0.5)
    assert gpu_share.memory_bounds(gpu_share.as_joined(config, on_same_machine=True)) == (0.25, 0.5, 8 << 30)
    assert gpu_share.memory_bounds(gpu_share.as_joined(config, on_same_machine=False)) == (1.0, 1.0, 0)
    before = os.sched_getaffinity(0)
    assert gpu_share.keep_to_own_cores(gpu_share.as_joined(_config(), on_same_machine=False)) == frozenset()
    assert os.sched_getaffinity(0) == before


def test_what_does_not_fit_is_refused_with_the_sum_and_a_share_that_does_not_divide_it_with_one_that_does():
    with pytest.raises(ConfigError, match=r"do not fit the device(.|\n)*training state(.|\n)*2 x \(weights .*KV cache"):
        gpu_share.check_shares(_config(device_memory_gib=0.01), {0, 1})
    with pytest.raises(ConfigError, match=r"set it between 0\.\d\d and 0\.\d\d") as refused:
        gpu_share.check_shares(_config(device_memory_gib=1.0, generation_share=0.99), {0, 1})
    least = float(str(refused.value).rsplit("between ", 1)[1][:4])
    gpu_share.check_shares(_config(device_memory_gib=1.0, generation_share=max(least, 0.5)), {0, 1})


def test_vllm_gets_its_share_as_kv_cache_under_a_budget_and_as_a_share_of_the_gpu_without():
    engine = {"kind": "vllm", "device": "cpu"}
    config = _config(engine=engine, device_memory_gib=2.0, generation_share=0.5)
    weights_gib = gpu_share.least_parts(config)[0].num_bytes / 2**30
    assert gpu_share.with_own_memory(config).generate.engine.kv_cache_gib == pytest.approx(0.5 - weights_gib)
    on_gpu = _config("cuda", engine={"kind": "vllm", "device": "cuda"}, generation_share=0.5)
    assert gpu_share.with_own_memory(on_gpu).generate.engine.gpu_memory_share == 0.25
    assert gpu_share.with_own_memory(parse_config({})) == parse_config({})


def test_inference_workers_on_the_same_device_and_a_rows_activations_are_in_the_sum():
    def said(**settings: object) -> str:
        config = _config(device_memory_gib=0.001)
        with pytest.raises(ConfigError) as refused:
            gpu_share.check_shares(parse_config(msgspec.to_builtins(config) | settings), {0, 1})
        return str(refused.value)

    reference = {"algorithm": {"kl": {}, "reference": {"where": "worker"}}}
    assert "activations 0." in said()
    assert "inference workers" not in said()
    assert "inference workers 0." in said(**reference)
    assert "inference workers" not in said(**reference, inference={"device": "cuda"})
