"""What the codec refuses; that messages come back as they went is in tests/golden/test_wire_bytes.py."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import CodecError
from asyncrl.schema.codec import decode, encode
from asyncrl.schema.control import Heartbeat
from asyncrl.schema.samples import Prompt, Samples, ScoredGroup, ScoredSample
from tests.builders import make_sample

SAMPLES = Samples.of([make_sample(tokens=[7] * 20_000)])


def test_a_message_over_the_limit_is_neither_encoded_nor_decoded():
    with pytest.raises(CodecError, match=r"Samples takes 24\d\d\d\d bytes, the limit is 1000"):
        encode(SAMPLES, max_bytes=1000)
    with pytest.raises(CodecError, match="limit is 100"):
        decode(encode(SAMPLES), max_bytes=100)


def test_what_cannot_travel_is_named():
    with pytest.raises(CodecError, match="Heartbeat cannot be encoded"):
        encode(Heartbeat("x", 0.0, gauges={"depth": object()}))


@pytest.mark.parametrize("frame", [
    *(b"", b"\xc1", b"\xc0", b"\x91" * 100_000, b"\x81\xa4type\xa2\xff\xfe"),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    msgspec.msgpack.encode({"type": "of_another_world"}), msgspec.msgpack.encode({"type": "pause"}) + b"\x00",
    msgspec.msgpack.encode({"type": "abort_group", "group_id": "17"}),
    msgspec.msgpack.encode({"type": "shutdown", "reason": b"bytes"}),
])  # fmt: skip
def test_bytes_that_are_no_message_raise_codec_error(frame):
    with pytest.raises(CodecError):
        decode(frame)


@given(st.data())
def test_a_message_with_flipped_bits_decodes_to_a_message_or_raises_codec_error(data):
    members = tuple(ScoredSample(make_sample(tokens=[7] * num), 1.0, {"a": 0.5}) for num in (3, 30))
    frame = bytearray(encode(ScoredGroup(1, Prompt("p", text="question"), members)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode(frame)
    except CodecError:
        return
