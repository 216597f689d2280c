from asyncrl.broadcast.chunks import BLOB, ChunkRequest, PlaceRequest
from asyncrl.broadcast.zeromq_desk import LearnerDesk
from asyncrl.broadcast.zeromq_shelf import Shelf


def desk_with(*versions: int) -> LearnerDesk:
    shelf = Shelf()
    for version in versions:
        shelf.put((version, "f"), memoryview(bytes(100)))
    shelf.put((BLOB, "delta"), memoryview(bytes(10)))
    return LearnerDesk(shelf, fanout=1, total_bytes=100)


def asking(version: int, name: str, **told: object) -> PlaceRequest:
    return PlaceRequest(version, "f", name, address=f"tcp://{name}:1", **told)


def test_a_version_is_spared_while_somebody_is_fed_it_by_another():
    desk = desk_with(1)
    assert desk.place(asking(1, "a")).parent == ""
    assert desk.place(asking(1, "b")).parent == "a"
    desk.place(asking(1, "a", is_whole=True))
    assert desk.versions_in_use() == {1}
    assert desk.place(asking(1, "b", is_whole=True)) is None
    assert desk.versions_in_use() == frozenset()


def test_who_asks_for_a_newer_version_no_longer_feeds_the_old_one():
    desk = desk_with(1, 2)
    desk.place(asking(1, "a", is_whole=True))
    desk.place(asking(1, "b"))
    desk.place(asking(2, "a"))
    assert desk.place(asking(1, "c")).parent == "b"


def test_a_delta_neither_spares_a_slot_nor_ends_anything():
    desk = desk_with(1)
    desk.place(asking(1, "a"))
    place = desk.place(PlaceRequest(BLOB, "delta", "a", address="tcp://a:1"))
    assert (place.parent, place.gone) == ("", "")
    desk.asked(b"x", ChunkRequest(BLOB, "delta", 0, 10))
    assert desk.versions_in_use() == {1}
    assert desk.place(asking(1, "b")).parent == "a"


def test_what_is_not_held_is_gone_and_what_is_held_is_named():
    place = desk_with(3, 4).place(asking(1, "a"))
    assert place.gone == "the learner now holds [3, 4]"
