import pytest

from asyncrl.broadcast.chunks import BLOB, ChunkRequest
from asyncrl.broadcast.zeromq_shelf import Shelf

KEY = (1, "f")


def cut(shelf: Shelf, offset: int, num_bytes: int, key: tuple[int, str] = KEY) -> tuple[str, bytes]:
    part = bytearray(16)
    outcome = shelf.cut(ChunkRequest(*key, offset, num_bytes), memoryview(part))
    return outcome, bytes(part[:num_bytes])


def test_what_is_arriving_is_served_part_by_part():
    shelf, memory = Shelf(), bytearray(10)
    shelf.begin(KEY, memoryview(memory), part_bytes=4)
    assert cut(shelf, 0, 4)[0] == "later"
    memory[4:8] = b"abcd"
    shelf.arrived(KEY, 4)
    assert cut(shelf, 4, 4) == ("here", b"abcd")
    assert cut(shelf, 5, 2) == ("here", b"bc")
    assert cut(shelf, 3, 4)[0] == "later"
    assert cut(shelf, 6, 4)[0] == "later"
    memory[8:] = b"ef"
    shelf.arrived(KEY, 8)
    assert cut(shelf, 6, 4) == ("here", b"cdef")


def test_what_was_dropped_is_gone_whatever_happens_to_its_bytes():
    shelf, memory = Shelf(), bytearray(b"abcd")
    shelf.put(KEY, memoryview(memory))
    assert cut(shelf, 0, 4) == ("here", b"abcd")
    shelf.drop(KEY)
    shelf.drop(KEY)
    memory[:] = b"xxxx"
    assert cut(shelf, 0, 4) == ("gone", bytes(4))


@pytest.mark.parametrize(("offset", "num_bytes"), [(4, 1), (0, 5), (2**62, 1)])
def test_what_lies_outside_is_told_apart_from_what_is_gone(offset, num_bytes):
    shelf = Shelf()
    shelf.put(KEY, memoryview(b"abcd"))
    assert cut(shelf, offset, num_bytes)[0] == "outside"


def test_a_version_of_another_learner_and_a_delta_of_the_same_name_are_not_confused():
    shelf = Shelf()
    shelf.put((BLOB, "f"), memoryview(b"delta"))
    shelf.put((1, "other"), memoryview(b"other"))
    assert cut(shelf, 0, 4)[0] == "gone"
    assert cut(shelf, 0, 5, (BLOB, "f")) == ("here", b"delta")
    assert shelf.keys() == [(BLOB, "f"), (1, "other")]
