import msgspec

from asyncrl.broadcast.chunks import ChunkReply, ChunkRequest, Download


def test_request_bytes_are_what_other_versions_expect():
    encoded = msgspec.msgpack.encode(ChunkRequest(7, "ab", 64, 32))
    assert encoded == (b"\x85\xa4type\xadchunk_request\xa7version\x07\xabfingerprint\xa2ab\xa6offset\x40\xa9num_bytes\x20")


def test_reply_bytes_are_what_other_versions_expect():
    encoded = msgspec.msgpack.encode(ChunkReply(7, 64, 0, "no"))
    assert encoded == b"\x85\xa4type\xabchunk_reply\xa7version\x07\xa6offset\x40\xa9num_bytes\x00\xa4gone\xa2no"


def test_no_more_than_a_window_is_asked_for():
    download = Download(total_bytes=100, chunk_bytes=10, window=3, resend_s=5.0)
    assert download.to_ask(0.0) == [(0, 10), (10, 10), (20, 10)]
    assert download.to_ask(0.1) == []
    assert download.take(10, 10)
    assert download.to_ask(0.2) == [(30, 10)]
    assert download.whole_until == 0


def test_what_does_not_come_is_asked_for_again_and_taken_once():
    download = Download(total_bytes=15, chunk_bytes=10, window=2, resend_s=5.0)
    download.to_ask(0.0)
    assert download.take(0, 10)
    assert download.to_ask(4.9) == []
    assert download.to_ask(5.0) == [(10, 5)]
    assert download.take(10, 5)
    assert not download.take(10, 5)
    assert download.is_done


def test_parts_nobody_asked_for_or_of_the_wrong_size_are_not_taken():
    download = Download(total_bytes=15, chunk_bytes=10, window=1, resend_s=5.0)
    download.to_ask(0.0)
    assert not download.take(10, 5)
    assert not download.take(0, 9)
    assert not download.take(3, 10)
    assert download.take(0, 10)
