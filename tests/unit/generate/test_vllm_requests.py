"""Requests and the versions of their tokens, over a vLLM whose every piece the test hands out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from asyncrl.errors import EngineDied, GenerationError
from asyncrl.generate.engine import EngineRequest, KVRoom, RequestRules
from asyncrl.generate.vllm.backend import Facts, Piece, sampling_arguments
from asyncrl.generate.vllm.requests import Requests
from asyncrl.schema.samples import SamplingParams
from tests.contract.engine_cases import Completion, collect

RULES = RequestRules(64, 100, frozenset({1, 2}))
FACTS = Facts(num_slots=2, block_tokens=1, is_remote=True, has_spans=True, most_scored_tokens=64)


class Scripted:
    """A backend that is told what it generates."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.fault = ""
        self.pieces: dict[str, asyncio.Queue] = {}
        self.begun: list[tuple[str, str]] = []
        self.num_open = 0

    async def stream(self, request, rules, salt):
        self.begun.append((request.request_id, salt))
        self.pieces[request.request_id] = asyncio.Queue()
        self.num_open += 1
        try:
            while True:
                news = await self.pieces[request.request_id].get()
                if news is None:
                    return
                if isinstance(news, Exception):
                    raise news
                yield news
        finally:
            self.num_open -= 1

    async def look(self) -> None:
        pass


class Run:
    """Requests over a scripted backend."""

    def __init__(self, facts: Facts = FACTS) -> None:
        self.backend = Scripted(facts)
        self.requests = Requests(self.backend, RULES, KVRoom(facts.num_slots, 1, 64))

    def submit(self, name: str = "a", **sampling):
        self.taken: list = []
        return self.requests.submit(request(name, **sampling))

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def give(self, *ids: int, reason: str | None = None, spans=None, logprob: float = -0.5, name: str = "a") -> None:
        await self.settle()
        account = None if spans is None else [(self.requests.label(version), num) for version, num in spans]
        self.backend.pieces[name].put_nowait(Piece(ids, [logprob] * len(ids), reason, account))
        if reason is not None:
            self.backend.pieces[name].put_nowait(None)
        await self.settle()


def request(name: str = "a", seed: int = 0, **sampling) -> EngineRequest:
    return EngineRequest(name, (5, 6), SamplingParams(**{"max_new_tokens": 9, **sampling}), seed)


async def test_tokens_before_the_first_update_are_handed_on_at_once() -> None:
    run = Run()
    run.requests.take_up(3)
    stream = run.submit()
    await run.give(5, 6)
    chunk = await anext(stream)
    assert (chunk.token_ids, chunk.versions, chunk.finish_reason) == ((5, 6), (3, 3), None)
    await run.requests.close()


@pytest.mark.parametrize("is_remote", [True, False])
async def test_tokens_after_an_update_wait_for_a_servers_account_and_not_for_an_embedded_engines(is_remote: bool) -> None:
    run = Run(replace(FACTS, is_remote=is_remote))
    run.requests.take_up(0)
    stream = run.submit()
    await run.give(5)
    first = await anext(stream)
    if not is_remote:
        await run.give(6)
    run.requests.take_up(1)
    if is_remote:
        await run.give(6)
    await run.give(7)
    await run.give(8, reason="length", spans=[(0, 2), (1, 2)])
    second = await anext(stream)
    assert second.token_ids == ((6, 7, 8) if is_remote else (6,))
    whole = await collect(stream, first, second)
    assert whole == Completion([5, 6, 7, 8], [-0.5] * 4, [0, 0, 1, 1], "length")


async def test_without_an_account_the_count_at_the_update_is_the_boundary() -> None:
    run = Run(replace(FACTS, has_spans=False))
    run.requests.take_up(0)
    stream = run.submit()
    await run.give(5)
    run.requests.take_up(1)
    await run.give(6)
    await run.give(7, reason="stop")
    assert (await collect(stream)).versions == [0, 1, 1]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(1, 2)], "contradicts"),
        ([(0, 1)], "weights of 1 of 2 tokens"),
        (None, "did not say which weights"),
        ([(0, 1), (-1, 1)], "contradicts"),
    ],
)
async def test_an_account_that_does_not_fit_fails_the_request(spans, expected: str) -> None:
    run = Run()
    run.requests.take_up(0)
    stream = run.submit()
    await run.give(5)
    run.requests.take_up(1)
    await run.give(6, reason="length", spans=spans)
    with pytest.raises(GenerationError, match=expected):
        await collect(stream)
    assert (len(run.requests), run.backend.num_open) == (0, 0)


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (Piece((5,), (-1.0,), "stop", [("default", 1)]), "'default', which this generator did not load"),
        (Piece((5,), (-float("inf"),)), "non-finite logits under version 0"),
        (Piece((5,), (-1.0,), "error"), "ended the request with 'error'"),
    ],
)
async def test_what_vllm_may_not_do_fails_the_request(piece: Piece, expected: str) -> None:
    run = Run()
    run.requests.take_up(0)
    stream = run.submit()
    await run.settle()
    run.backend.pieces["a"].put_nowait(piece)
    with pytest.raises(GenerationError, match=rf"request a: .*{expected}"):
        await collect(stream)
    assert run.requests.met_non_finite == ("non-finite" in expected)


async def test_a_stream_that_ends_without_a_reason_is_an_abort_and_drops_what_is_uncertain() -> None:
    run = Run()
    stream = run.submit()
    await run.give(5)
    run.requests.take_up(0)
    await run.give(6)
    run.backend.pieces["a"].put_nowait(None)
    whole = await collect(stream)
    assert (whole.token_ids, whole.finish_reason) == ([5], "abort")


async def test_a_dead_vllm_fails_no_request_by_itself() -> None:
    run = Run()
    streams = [run.submit(name) for name in ("a", "b", "c")]
    await run.settle()
    run.backend.fault = "the core died"
    run.backend.pieces["a"].put_nowait(GenerationError("broken pipe"))
    with pytest.raises(EngineDied, match="the core died"):
        await collect(streams[0])
    run.requests.fail_all(run.backend.fault)
    for stream in streams[1:]:
        with pytest.raises(EngineDied, match="the core died"):
            await collect(stream)


async def test_a_request_without_a_token_begins_anew_and_what_it_gets_meanwhile_is_dropped() -> None:
    run = Run()
    run.requests.take_up(0)
    stream = run.submit()
    await run.settle()
    run.requests.shut_gate()
    run.backend.pieces["a"].put_nowait(Piece((9,), (-0.5,)))
    run.requests.take_up(1)
    await run.settle()
    assert (len(run.backend.begun), run.backend.num_open) == (1, 0)
    run.requests.open_gate()
    await run.give(5, reason="length", spans=[(1, 1)])
    assert await collect(stream) == Completion([5], [-0.5], [1], "length")
    (_, before), (_, after) = run.backend.begun
    assert before != after


async def test_what_has_no_seat_waits_here_and_a_seat_is_given_up_a_token_early() -> None:
    run = Run()
    streams = [run.submit(name, max_new_tokens=2) for name in ("a", "b", "c")]
    await run.settle()
    assert [name for name, _ in run.backend.begun] == ["a", "b"]
    await run.give(5)
    assert [name for name, _ in run.backend.begun] == ["a", "b", "c"]
    run.requests.abort("c")
    assert (await collect(streams[2])).finish_reason == "abort"
    await run.requests.close()
    assert run.backend.num_open == 0


async def test_greedy_tokens_have_logprob_zero() -> None:
    run = Run()
    stream = run.submit(temperature=0.0)
    await run.give(5, reason="stop", spans=[(-1, 1)])
    assert (await collect(stream)).logprobs == [0.0]


def test_end_tokens_and_stop_tokens_are_both_stops_of_ours() -> None:
    arguments = sampling_arguments(request(seed=(1 << 64) - 1, stop_token_ids=(7,)), RULES)
    assert arguments["stop_token_ids"] == [1, 2, 7]
    assert arguments["ignore_eos"], "vLLM's own rule needs a tokenizer"
    assert arguments["max_tokens"] == 9
    assert 0 <= arguments["seed"] < 1 << 63
