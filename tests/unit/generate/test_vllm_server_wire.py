from __future__ import annotations

import msgspec
import pytest

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.request_rules import RequestRules
from asyncrl.generate.vllm_server_gauges import read_gauges
from asyncrl.generate.vllm_server_wire import EventSplitter, completion_body, decode_reply, prompt_body, prompt_logprobs
from asyncrl.schema.samples import SamplingParams

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


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_whole_whatever_pieces_they_arrive_in(size: int) -> None:
    stream = b'data: {"a":1}\n\ndata: {"b":2}\r\n\r\n: comment\n\ndata: [DONE]\n\n'
    splitter = EventSplitter()
    events = [event for start in range(0, len(stream), size) for event in splitter.feed(stream[start : start + size])]
    assert events == [b'{"a":1}', b'{"b":2}', b"[DONE]"]


@pytest.mark.parametrize("raw", [b'{"error": {"message": "engine died", "code": 500}}', b'{"error": "engine died"}'])
def test_an_error_in_the_stream_is_told(raw: bytes) -> None:
    with pytest.raises(GenerationError, match="engine died"):
        decode_reply(raw)


def test_what_is_no_answer_is_told() -> None:
    with pytest.raises(GenerationError, match="no answer of /inference"):
        decode_reply(b"<html>")


def test_a_request_names_the_models_own_end_tokens_and_the_given_ones() -> None:
    rules = RequestRules(vocabulary_size=64, max_sequence_tokens=64, end_ids=frozenset({1}))
    request = EngineRequest("a", (5, 6), SamplingParams(max_new_tokens=4, stop_token_ids=(9,), temperature=0.7), 11)
    body = msgspec.json.decode(msgspec.json.encode(completion_body(request, rules, "salt")))
    assert (body["token_ids"], body["cache_salt"], body["stream"]) == ([5, 6], "salt", True)
    sampling = body["sampling_params"]
    assert (sampling["stop_token_ids"], sampling["logprobs"], sampling["seed"], sampling["max_tokens"]) == ([1, 9], 0, 11, 4)


def test_prompt_logprobs_are_those_of_the_prompts_own_tokens() -> None:
    reply = decode_reply(
        b'{"choices":[],"prompt_logprobs":[null,{"6":{"logprob":-1.5}},{"9":{"logprob":0.0},"7":{"logprob":-2.5}}]}'
    )
    assert prompt_logprobs(reply, (5, 6, 7)) == [-1.5, -2.5]
    assert prompt_body((5, 6, 7), "salt").sampling_params.prompt_logprobs == 0


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
