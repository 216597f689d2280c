from __future__ import annotations

import pytest

from asyncrl.errors import GenerationError
from asyncrl.generate.vllm.http_client import decode_reply, prompt_logprobs
from asyncrl.generate.vllm.server import read_gauges

METRICS = """# HELP process_start_time_seconds Start time.
process_start_time_seconds 1.5e+09
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",effective_attention_block_size="128",num_gpu_blocks="100",num_gpu_blocks_override="7"} 1.0
vllm:cache_config_info{block_size="16",effective_attention_block_size="128",num_gpu_blocks="100",num_cpu_blocks="None"} 1.0
"""


@pytest.mark.parametrize("raw", [b'{"error": {"message": "engine died", "code": 500}}', b'{"error": "engine died"}'])
def test_an_error_in_the_stream_is_told(raw: bytes) -> None:
    with pytest.raises(GenerationError, match="engine died"):
        decode_reply(raw)


def test_what_is_no_answer_is_told() -> None:
    with pytest.raises(GenerationError, match="/inference/v1/generate is not understood"):
        decode_reply(b"<html>")


def test_prompt_logprobs_are_those_of_the_prompts_own_tokens() -> None:
    reply = decode_reply(
        b'{"choices":[],"prompt_logprobs":[null,{"6":{"logprob":-1.5}},{"9":{"logprob":0.0},"7":{"logprob":-2.5}}]}'
    )
    assert prompt_logprobs(reply, (5, 6, 7)) == [-1.5, -2.5]


@pytest.mark.parametrize("raw", [b'{"choices":[]}', b'{"prompt_logprobs":[null,{"9":{"logprob":-1}}]}'])
def test_missing_prompt_logprobs_are_told(raw: bytes) -> None:
    with pytest.raises(GenerationError, match="prompt token"):
        prompt_logprobs(decode_reply(raw), (5, 6))


def test_gauges_of_several_engines_are_added_up() -> None:
    gauges = read_gauges(METRICS)
    assert (gauges.started_s, gauges.running, gauges.free_blocks, gauges.block_tokens) == (1.5e9, 4, 125, 16)


def test_gauges_that_are_not_there_are_empty() -> None:
    gauges = read_gauges("python_info 1.0\n")
    assert (gauges.started_s, gauges.running, gauges.free_blocks, gauges.block_tokens) == (0.0, 0, 0, 0)
