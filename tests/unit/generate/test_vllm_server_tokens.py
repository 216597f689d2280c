from __future__ import annotations

import pytest

from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_server_tokens import VersionedTokens, VersionLabels
from asyncrl.generate.vllm_server_wire import Choice, ChoiceLogprobs, LogprobEntry, VersionSpan

LABELS = VersionLabels("me")


def piece(*ids: int, reason: str | None = None, spans: list[tuple[int, int, int]] | None = None, logprob: float = -0.5) -> Choice:
    named = None if spans is None else tuple(VersionSpan(LABELS.of(version), start, end) for version, start, end in spans)
    return Choice(reason, ids, ChoiceLogprobs(tuple(LogprobEntry(logprob) for _ in ids)), named)


def test_tokens_before_the_first_update_are_handed_on_at_once() -> None:
    tokens = VersionedTokens(3, LABELS)
    chunk = tokens.take(piece(5, 6))
    assert chunk is not None
    assert (chunk.token_ids, chunk.versions, chunk.finish_reason) == ((5, 6), (3, 3), None)


def test_tokens_after_an_update_wait_for_the_servers_account() -> None:
    tokens = VersionedTokens(0, LABELS)
    tokens.take(piece(5))
    tokens.note_update(1)
    assert tokens.take(piece(6)) is None
    assert tokens.take(piece(7)) is None
    chunk = tokens.take(piece(8, reason="length", spans=[(0, 0, 2), (1, 2, 4)]))
    assert chunk is not None
    assert (chunk.token_ids, chunk.versions, chunk.finish_reason) == ((6, 7, 8), (0, 1, 1), "length")


def test_without_spans_the_count_at_the_update_is_the_boundary() -> None:
    tokens = VersionedTokens(0, None)
    chunks = [tokens.take(piece(5))]
    tokens.note_update(1)
    chunks += [tokens.take(piece(6)), tokens.take(piece(7, reason="stop"))]
    assert [chunk.versions for chunk in chunks if chunk is not None] == [(0,), (1,), (1,)]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(1, 0, 2)], "contradicts"),
        ([(0, 0, 1)], "weights of 1 of 2 tokens"),
        (None, "weights of 0 of 2 tokens"),
        ([(0, 0, 1), (-1, 1, 2)], "contradicts"),
    ],
)
def test_an_account_that_does_not_fit_fails_the_request(spans, expected: str) -> None:
    tokens = VersionedTokens(0, LABELS)
    tokens.take(piece(5))
    with pytest.raises(GenerationError, match=expected):
        tokens.take(piece(6, reason="length", spans=spans))


def test_weights_that_somebody_else_loaded_fail_the_request() -> None:
    choice = Choice("stop", (5,), ChoiceLogprobs((LogprobEntry(-1.0),)), (VersionSpan("default", 0, 1),))
    with pytest.raises(GenerationError, match="'default', which this generator did not load"):
        VersionedTokens(0, LABELS).take(choice)


def test_a_stream_that_ends_without_a_reason_is_an_abort_and_drops_what_is_uncertain() -> None:
    tokens = VersionedTokens(0, LABELS)
    tokens.take(piece(5))
    tokens.note_update(1)
    tokens.take(piece(6))
    assert tokens.end().finish_reason == "abort"
    assert tokens.end().token_ids == ()
    assert tokens.num_tokens == 1


def test_a_completion_of_no_tokens_needs_no_account() -> None:
    chunk = VersionedTokens(0, LABELS).take(piece(reason="abort"))
    assert chunk is not None
    assert (chunk.token_ids, chunk.finish_reason) == ((), "abort")


def test_greedy_tokens_have_logprob_zero() -> None:
    chunk = VersionedTokens(0, LABELS, is_greedy=True).take(piece(5))
    assert chunk is not None
    assert chunk.logprobs == (0.0,)


def test_logprobs_that_are_no_numbers_fail_the_request() -> None:
    with pytest.raises(GenerationError, match="non-finite"):
        VersionedTokens(0, LABELS).take(piece(5, logprob=-9999.0))


def test_an_unknown_ending_fails_the_request() -> None:
    with pytest.raises(GenerationError, match="'error'"):
        VersionedTokens(0, None).take(piece(5, reason="error"))
