"""vLLM's engine over a backend that the test plays: what vLLM cannot be made to do, loads that fail, sleep, death."""

import asyncio

import pytest
import torch

from asyncrl.config.generate import VLLMServerEngineConfig
from asyncrl.errors import BroadcastError, EngineDied, GenerationError
from asyncrl.generate.engine import Piece
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.generate.vllm.load_request import LoadReply
from asyncrl.models.layout import make_manifest
from asyncrl.weights.tensors import MappedTensors
from tests.contract.engine_cases import collect, make_model, make_request, tensors_of

TENSORS = tensors_of(make_model(0, hidden_size=8, num_hidden_layers=1))


class Scripted:
    """A backend that is told what it generates and notes what it is told."""

    shared_folder = load_hint = fault = ""
    num_slots, block_tokens = 2, 0

    def __init__(self) -> None:
        self.config = VLLMServerEngineConfig(num_slots=2, max_sequence_tokens=64)
        self.told: list[object] = []
        self.pieces: dict[str, asyncio.Queue] = {}
        self.replies = [LoadReply()]
        self.label = ""

    async def start(self, folder, on_room, on_death) -> None:
        self.on_death = on_death

    async def stream(self, request, rules, salt):
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

    async def sleep(self) -> None:
        self.told.append("sleep")

    async def wake_up(self, tag) -> None:
        self.told.append(f"wake {tag}")

    async def resume(self) -> None:
        self.told.append("resume")

    async def look(self) -> None:
        pass

    close = look


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def engine(folder):
    engine = VLLMEngine(Scripted(), folder)
    await engine.start()
    yield engine
    await engine.close()
    assert not engine.backend.pieces


@pytest.mark.parametrize("spans", [[(1, 2)], [(0, 1)], [(0, 1), (-1, 1)], [(0, 3)]])
async def test_an_account_that_does_not_fit_fails_the_request(engine, spans) -> None:
    await engine.load_weights(0, TENSORS, "keep")
    stream = engine.submit(make_request("a"))
    await settle()
    mark = engine.backend.label.rpartition(".")[0]
    account = [(f"{mark}.{version}", num) for version, num in spans]
    for piece in (Piece((5,), [-0.5], None, None), Piece((6,), [-0.5], "length", account)):
        engine.backend.pieces["a"].put_nowait(piece)
    with pytest.raises(GenerationError, match=r"request a: vLLM's account of which weights .* contradicts"):
        await collect(stream)
    assert engine.num_running == 0


@pytest.mark.parametrize(("piece", "expected"), [
    (Piece((5,), (-1.0,), "stop", [("default", 1)]), "'default', which this generator did not load"),
    (Piece((5,), (-1.0,), "error"), "ended it with 'error'"),
    (Piece((), (), "abort"), "ended it with 'abort'"),
    (None, "ended without a reason"),
    (GenerationError("broken pipe"), "broken pipe"),
])  # fmt: skip
async def test_what_vllm_may_not_do_fails_the_request_and_a_dead_vllm_fails_none(engine, piece, expected: str) -> None:
    for fault in ("", "the core died"):
        stream = engine.submit(make_request("a"))
        await settle()
        engine.backend.fault = fault
        engine.backend.pieces["a"].put_nowait(piece)
        if not (fault and piece is None):
            with pytest.raises(EngineDied if fault else GenerationError, match=fault or f"request a: .*{expected}"):
                await collect(stream)
    with pytest.raises(EngineDied, match="the core died"):
        _ = engine.num_slots


@pytest.mark.parametrize(("replies", "hint", "kind", "expected"), [
    ([LoadReply(), LoadReply("broadcast", "gone")], "", BroadcastError, "gone"),
    ([LoadReply("broadcast", "gone")], "; see shared_folder", GenerationError, "gone; see shared_folder"),
    ([LoadReply("generation", "half")], "", GenerationError, "half"),
    ([], "", GenerationError, "no worker answered"),
    ([LoadReply()], "", BroadcastError, "overwritten"),
])  # fmt: skip
async def test_after_a_load_that_failed_nothing_is_sampled_until_another_succeeds(engine, replies, hint, kind, expected) -> None:
    def overwritten() -> None:
        if expected == "overwritten":
            raise BroadcastError(expected)

    engine.backend.replies, engine.backend.load_hint = replies, hint
    manifest = make_manifest(TENSORS)
    mapped = MappedTensors(manifest, torch.zeros(manifest.total_bytes, dtype=torch.uint8), "slot", check=overwritten)
    with pytest.raises(kind, match=expected):
        await engine.load_weights(0, mapped, "recompute")
    await engine.resume()
    with pytest.raises(GenerationError, match="came only in part"):
        await engine.score([2, 3])
    assert (engine.backend.told, engine.version) == (["pause and clear", "load"], -1)
    engine.backend.replies = [LoadReply()]
    await engine.load_weights(1, TENSORS, "keep")
    assert (engine.backend.told[-1], engine.version) == ("resume", 1)
    assert await engine.score([2, 3, 4]) == [-1.0, -1.0]


async def test_a_version_of_which_nothing_came_to_any_worker_leaves_the_old_one_serving(engine) -> None:
    nothing = LoadReply("broadcast", "gone", is_untouched=True)
    for replies, score in (([nothing, nothing], [-1.0]), ([nothing, LoadReply()], None), ([nothing, nothing], None)):
        if score:
            await engine.load_weights(0, TENSORS, "keep")
        engine.backend.replies = replies
        with pytest.raises(BroadcastError, match="gone"):
            await engine.load_weights(1, TENSORS, "keep")
        assert (engine.version, engine.has_weights, engine.backend.told[-1]) == (0, bool(score), "resume" if score else "load")


async def test_after_a_wake_to_which_no_version_came_vllm_cannot_sleep_and_a_new_one_is_wanted(engine) -> None:
    """It stands still with half of its memory, and would call that sleep (0.26)."""
    await engine.sleep()
    await engine.wake()
    with pytest.raises(EngineDied, match="no whole version came"):
        await engine.sleep()


async def test_sleeping_and_waking_twice_are_as_once(engine) -> None:
    await engine.wake()
    await engine.sleep()
    await engine.sleep()
    for order in (engine.score([2, 3]), engine.load_weights(1, TENSORS, "keep")):
        with pytest.raises(GenerationError, match="asleep; wake it first"):
            await order
    await engine.wake()
    await engine.wake()
    with pytest.raises(GenerationError, match="of no version"):
        await engine.score([2, 3])
    await engine.load_weights(1, TENSORS, "keep")
    assert engine.backend.told == ["pause and clear", "sleep", "wake weights", "pause", "load", "wake kv_cache"], (
        "vLLM goes on with the last of its memory: by then the weights have come"
    )
