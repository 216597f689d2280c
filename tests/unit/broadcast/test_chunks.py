import msgspec

from asyncrl.broadcast.chunks import (
    MAX_LOST,
    MAX_REQUEST_BYTES,
    ChunkReply,
    ChunkRequest,
    Download,
    PlaceReply,
    PlaceRequest,
    parts_of,
)


def test_request_bytes_are_what_other_versions_expect():
    encoded = msgspec.msgpack.encode(ChunkRequest(7, "ab", 64, 32))
    assert encoded == (b"\x85\xa4type\xadchunk_request\xa7version\x07\xabfingerprint\xa2ab\xa6offset\x40\xa9num_bytes\x20")


def test_reply_bytes_are_what_other_versions_expect():
    encoded = msgspec.msgpack.encode(ChunkReply(7, 64, 0, "no"))
    assert encoded == b"\x85\xa4type\xabchunk_reply\xa7version\x07\xa6offset\x40\xa9num_bytes\x00\xa4gone\xa2no"


def test_place_bytes_are_what_other_versions_expect():
    asked = msgspec.msgpack.encode(PlaceRequest(7, "ab", "me", lost=("x",), is_whole=True))
    assert asked == (
        b"\x86\xa4type\xadplace_request\xa7version\x07\xabfingerprint\xa2ab\xaasubscriber\xa2me\xa4lost\x91\xa1x\xa8is_whole\xc3"
    )
    told = msgspec.msgpack.encode(PlaceReply(7, "you", "tcp://a:1"))
    assert told == b"\x84\xa4type\xabplace_reply\xa7version\x07\xa6parent\xa3you\xa7address\xa9tcp://a:1"


def test_the_largest_place_request_fits_in_what_the_learner_takes():
    lost = tuple("f" * 16 for _ in range(MAX_LOST))
    request = PlaceRequest(2**62, "f" * 64, "s" * 16, "a" * 128, "h" * 64, lost, 2**62, is_whole=True)
    assert len(msgspec.msgpack.encode(request)) <= MAX_REQUEST_BYTES


def test_no_more_than_a_window_is_asked_for_and_no_less_than_half_of_one_at_once():
    download = Download(total_bytes=100, chunk_bytes=10, window=4, resend_s=5.0)
    assert download.to_ask(0.0) == [(0, 40)]
    assert download.to_ask(0.1) == []
    assert download.take(10, 10)
    assert download.to_ask(0.2) == []
    assert download.take(30, 10)
    assert download.to_ask(0.3) == [(40, 20)]
    assert download.whole_until == 0


def test_a_request_for_several_parts_is_answered_part_by_part():
    request = ChunkRequest(7, "ab", 20, 25)
    parts = parts_of(request, part_bytes=10)
    assert [(part.version, part.fingerprint) for part in parts] == [(7, "ab")] * 3
    assert [(part.offset, part.num_bytes) for part in parts] == [(20, 10), (30, 10), (40, 5)]


def test_what_does_not_come_is_asked_for_again_once_nothing_moves_and_is_taken_once():
    download = Download(total_bytes=15, chunk_bytes=10, window=2, resend_s=5.0)
    download.to_ask(0.0)
    assert download.take(0, 10)
    assert download.to_ask(4.9) == []
    assert download.to_ask(9.8) == []
    assert download.to_ask(9.9) == [(10, 5)]
    assert download.take(10, 5)
    assert not download.take(10, 5)
    assert download.is_done


def test_a_lost_window_is_asked_for_again_at_once_and_what_is_here_is_not():
    download = Download(total_bytes=50, chunk_bytes=10, window=3, resend_s=5.0)
    download.to_ask(0.0)
    assert download.take(10, 10)
    download.lose()
    assert download.to_ask(0.1) == [(0, 10), (20, 20)]
    assert download.have_bytes == 10


def test_a_part_that_was_thought_lost_is_still_taken():
    download = Download(total_bytes=20, chunk_bytes=10, window=2, resend_s=5.0)
    download.to_ask(0.0)
    download.lose()
    assert download.take(0, 10)
    assert download.to_ask(0.1) == [(10, 10)]


def test_parts_nobody_asked_for_or_of_the_wrong_size_are_not_taken():
    download = Download(total_bytes=15, chunk_bytes=10, window=1, resend_s=5.0)
    download.to_ask(0.0)
    assert not download.take(10, 5)
    assert not download.take(0, 9)
    assert not download.take(3, 10)
    assert download.take(0, 10)
