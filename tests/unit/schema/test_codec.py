from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import CodecError
from asyncrl.schema.codec import decode, encode
from asyncrl.schema.control import Heartbeat
from asyncrl.schema.samples import Prompt, Sample, SampleFailure, Samples, ScoredGroup, ScoredSample


def make_sample(num_tokens: int, prompt_tokens: int = 3) -> Sample:
    return Sample(
        group_id=1,
        index=0,
        attempt=1,
        prompt_ids=os.urandom(4 * prompt_tokens),
        token_ids=os.urandom(4 * num_tokens),
        logprobs=os.urandom(4 * num_tokens),
        versions=os.urandom(4 * num_tokens),
        finish_reason="length",
        text="so it goes",
        generator="generator-0",
        started_s=1.0,
        finished_s=2.0,
    )


def make_samples(num_tokens: int) -> Samples:
    return Samples.of([make_sample(num_tokens)])


def make_group(*members: Sample) -> ScoredGroup:
    return ScoredGroup(1, Prompt("p", text="question"), tuple(ScoredSample(member, 1.0, {"a": 0.5}) for member in members))


@given(st.integers(0, 50), st.integers(0, 3), st.text("ab é\n\0"), st.sampled_from(["generate", "reward"]))
def test_what_is_encoded_is_decoded(group_id, index, reason, stage):
    message = SampleFailure(group_id, index, 1, stage, reason)
    assert decode(encode(message)) == message


def test_a_message_over_the_limit_is_not_encoded():
    with pytest.raises(CodecError, match=r"Samples takes 24\d\d\d\d bytes, the limit is 1000"):
        encode(make_samples(20_000), max_bytes=1000)
    with pytest.raises(CodecError, match="limit is 100"):
        encode(make_samples(100), max_bytes=100)


def test_a_message_over_the_limit_is_not_decoded():
    with pytest.raises(CodecError, match="limit is 100"):
        decode(encode(make_samples(100)), max_bytes=100)


def test_what_cannot_travel_is_named():
    with pytest.raises(CodecError, match="Heartbeat cannot be encoded"):
        encode(Heartbeat("x", 0.0, gauges={"depth": object()}))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\xa4type\xa2\xff\xfe",
        msgspec.msgpack.encode({"type": "of_another_world"}),
        msgspec.msgpack.encode({"type": "pause"}) + b"\x00",
        msgspec.msgpack.encode({"type": "abort_group"}),
        msgspec.msgpack.encode({"type": "abort_group", "group_id": "17"}),
        msgspec.msgpack.encode({"type": "shutdown", "reason": b"bytes"}),
    ],
)
def test_bytes_that_are_no_message_raise_codec_error(frame):
    with pytest.raises(CodecError):
        decode(frame)


@given(st.data())
def test_a_message_with_flipped_bits_decodes_to_a_message_or_raises_codec_error(data):
    frame = bytearray(encode(make_group(make_sample(3), make_sample(30))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode(frame)
    except CodecError:
        return
