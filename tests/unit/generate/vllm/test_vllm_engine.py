"""vLLM's engine over a backend that the test plays: versions of tokens, seats, loads that fail, sleep, death."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from asyncrl.config.generate import VLLMServerEngineConfig
from asyncrl.errors import BroadcastError, EngineDied, GenerationError
from asyncrl.generate.engine import RequestRules
from asyncrl.generate.vllm.backend import Piece, sampling_arguments
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.generate.vllm.load_request import LoadReply
from tests.contract.engine_cases import Completion, collect, make_model, make_request, tensors_of

TENSORS = tensors_of(make_model(0, hidden_size=8, num_hidden_layers=1))


class Scripted:
    """A backend that is told what it generates and notes what it is told."""

    shared_folder = why_no_sleep = load_hint = fault = ""
    num_slots, block_tokens = 2, 0

    def __init__(self) -> None:
        self.config = VLLMServerEngineConfig(num_slots=2, max_sequence_tokens=64)
        self.told: list[object] = []
        self.pieces: dict[str, asyncio.Queue] = {}
        self.salts: dict[str, str] = {}
        self.replies = [LoadReply()]
        self.label = ""
        self.fails_to_sleep = False

    async def start(self, folder, on_room, on_death) -> None:
        self.on_death = on_death

    async def stream(self, request, rules, salt):
        self.salts[request.request_id] = salt
        queue = self.pieces[request.request_id] = asyncio.Queue()
        try:
            while (news := await queue.get()) is not None:
                if isinstance(news, Exception):
                    raise news
                yield news
        finally:
            del self.pieces[request.request_id]

    async def name_weights(self, label) -> None:
        self.label = label

    async def pause(self, *, clear_cache) -> None:
        self.told.append("pause and clear" if clear_cache else "pause")

    async def load(self, request):
        self.told.append("load and zero" if request.zero_kv else "load")
        return self.replies

    async def score(self, token_ids, salt):
        return [-1.0] * (len(token_ids) - 1)

    async def sleep(self, level) -> None:
        if self.fails_to_sleep:
            raise GenerationError("no room in host memory")
        self.told.append(f"sleep {level}")

    async def wake_up(self, tag="") -> None:
        self.told.append(f"wake {tag or 'all'}")

    async def resume(self) -> None:
        self.told.append("resume")

    async def look(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def run(folder):
    backend = Scripted()
    engine = VLLMEngine(backend, folder)
    await engine.start()

    async def give(*ids: int, reason: str | None = None, spans=None, name: str = "a", logprob: float = -0.5) -> None:
        await settle()
        mark = backend.label.rpartition(".")[0]
        account = None if spans is None else [(f"{mark}.{version}", num) for version, num in spans]
        backend.pieces[name].put_nowait(Piece(ids, [logprob] * len(ids), reason, account))
        if reason is not None:
            backend.pieces[name].put_nowait(None)
        await settle()

    yield SimpleNamespace(engine=engine, backend=backend, give=give)
    await engine.close()
    assert not backend.pieces


async def test_tokens_have_the_version_in_force_when_they_arrive_and_vllms_account_agrees(run) -> None:
    await run.engine.load_weights(3, TENSORS, "keep")
    stream = run.engine.submit(make_request("a"))
    await run.give(5, 6)
    first = await anext(stream)
    assert (first.token_ids, first.versions) == ((5, 6), (3, 3))
    await run.engine.load_weights(4, TENSORS, "keep")
    await run.give(7)
    await run.give(8, reason="length", spans=[(3, 2), (4, 2)])
    assert await collect(stream, first) == Completion([5, 6, 7, 8], [-0.5] * 4, [3, 3, 4, 4], "length")


@pytest.mark.parametrize("spans", [[(1, 2)], [(0, 1)], [(0, 1), (-1, 1)], [(0, 3)]])
async def test_an_account_that_does_not_fit_fails_the_request(run, spans) -> None:
    await run.engine.load_weights(0, TENSORS, "keep")
    stream = run.engine.submit(make_request("a"))
    await run.give(5)
    await run.give(6, reason="length", spans=spans)
    with pytest.raises(GenerationError, match=r"request a: vLLM's account of which weights .* contradicts"):
        await collect(stream)
    assert run.engine.num_running == 0


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (Piece((5,), (-1.0,), "stop", [("default", 1)]), "'default', which this generator did not load"),
        (Piece((5,), (-1.0,), "error"), "ended it with 'error'"),
        (Piece((), (), "abort"), "ended it with 'abort'"),
        (None, "ended without a reason"),
        (GenerationError("broken pipe"), "broken pipe"),
    ],
)
async def test_what_vllm_may_not_do_fails_the_request_and_a_dead_vllm_fails_none(run, piece, expected: str) -> None:
    for fault in ("", "the core died"):
        stream = run.engine.submit(make_request("a"))
        await settle()
        run.backend.fault = fault
        run.backend.pieces["a"].put_nowait(piece)
        if not (fault and piece is None):
            with pytest.raises(EngineDied if fault else GenerationError, match=fault or f"request a: .*{expected}"):
                await collect(stream)
    with pytest.raises(EngineDied, match="the core died"):
        _ = run.engine.num_slots


async def test_after_logits_that_were_not_finite_no_key_or_value_is_met_again(run) -> None:
    stream = run.engine.submit(make_request("a"))
    await run.give(5, logprob=-float("inf"))
    with pytest.raises(GenerationError, match="request a: the model gave non-finite logits under version -1, after 0 tokens"):
        await collect(stream)
    await run.engine.load_weights(0, TENSORS, "keep")
    await run.engine.load_weights(1, TENSORS, "keep")
    assert run.backend.told == ["pause and clear", "load and zero", "resume", "pause", "load", "resume"]


async def test_what_has_no_seat_waits_here_and_meets_the_newest_weights(run) -> None:
    """One seat more than slots: the follower of a request about to end is there."""
    streams = {name: run.engine.submit(make_request(name)) for name in ("a", "b", "c", "d", "e")}
    await settle()
    assert set(run.backend.pieces) == {"a", "b", "c"}
    await run.engine.load_weights(0, TENSORS, "keep")
    run.engine.abort("d")
    assert (await collect(streams["d"])).finish_reason == "abort"
    await run.give(5, reason="stop")
    await settle()
    assert set(run.backend.pieces) == {"b", "c", "e"}
    assert run.backend.salts["e"] != run.backend.salts["b"]
    streams["b"].close()
    await settle()
    assert set(run.backend.pieces) == {"c", "e"}


def test_end_tokens_and_stop_tokens_are_both_stops_of_ours() -> None:
    request = make_request("a", seed=(1 << 64) - 1, stop_token_ids=(7,), ignore_eos=False, max_new_tokens=9)
    arguments = sampling_arguments(request, RequestRules(64, 64, frozenset({1, 2})))
    assert arguments["stop_token_ids"] == [1, 2, 7]
    assert arguments["ignore_eos"], "vLLM's own rule needs a tokenizer"
    assert arguments["max_tokens"] == 9
    assert 0 <= arguments["seed"] < 1 << 63


@pytest.mark.parametrize(
    ("replies", "hint", "kind", "expected"),
    [
        ([LoadReply(), LoadReply("broadcast", "gone")], "", BroadcastError, "gone"),
        ([LoadReply("broadcast", "gone")], "; see shared_folder", GenerationError, "gone; see shared_folder"),
        ([LoadReply("generation", "half")], "", GenerationError, "half"),
        ([], "", GenerationError, "no worker answered"),
    ],
)
async def test_after_a_load_that_failed_nothing_is_sampled_until_another_succeeds(run, replies, hint, kind, expected) -> None:
    run.backend.replies, run.backend.load_hint = replies, hint
    with pytest.raises(kind, match=expected):
        await run.engine.load_weights(0, TENSORS, "recompute")
    await run.engine.resume()
    with pytest.raises(GenerationError, match="came only in part"):
        await run.engine.score([2, 3])
    assert (run.backend.told, run.engine.version) == (["pause and clear", "load"], -1)
    run.backend.replies = [LoadReply()]
    await run.engine.load_weights(1, TENSORS, "keep")
    assert (run.backend.told[-1], run.engine.version) == ("resume", 1)
    assert await run.engine.score([2, 3, 4]) == [-1.0, -1.0]


async def test_sleeping_and_waking_twice_are_as_once_and_deeper_is_deeper(run) -> None:
    await run.engine.wake()
    for level in (1, 1, 2, 1):
        await run.engine.sleep(level)
    for order in (run.engine.score([2, 3]), run.engine.load_weights(1, TENSORS, "keep")):
        with pytest.raises(GenerationError, match="asleep; wake it first"):
            await order
    await run.engine.wake()
    await run.engine.wake()
    with pytest.raises(GenerationError, match="of no version"):
        await run.engine.score([2, 3])
    await run.engine.load_weights(1, TENSORS, "keep")
    assert run.backend.told == [
        *("pause and clear", "sleep 1", "pause and clear", "wake all", "sleep 2", "wake weights"),
        *("pause", "load", "wake kv_cache"),
    ], "vLLM goes on with the last of its memory: by then the weights have come"


async def test_an_engine_that_could_not_fall_asleep_goes_on_and_one_that_never_can_says_why(run) -> None:
    run.backend.fails_to_sleep = True
    with pytest.raises(GenerationError, match="no room"):
        await run.engine.sleep(1)
    assert run.backend.told == ["pause and clear", "resume"]
    run.backend.why_no_sleep = "the engine cannot sleep"
    with pytest.raises(GenerationError, match="cannot sleep"):
        await run.engine.sleep(1)
