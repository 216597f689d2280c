"""Who is heard at the learner's desk, and what is not understood there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from asyncrl.broadcast.collective_socket import Desk, Line
from asyncrl.broadcast.collective_wire import MAX_MESSAGE_BYTES, BlobHere, Leaving, Noted, Ready
from asyncrl.broadcast.zeromq_keys import CurveKeys
from asyncrl.errors import ConfigError

HOST = "127.0.0.1"


def hear(desk: Desk, wanted: int = 1) -> list[object]:
    """Return what was heard once that many messages were, or nothing came for a while."""
    heard: list[object] = []
    for _ in range(50):
        heard += desk.hear(0.1)
        if len(heard) >= wanted:
            break
    return heard


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk(HOST, None)
    yield desk
    desk.close()


def test_every_member_is_answered_by_name(desk):
    lines = [Line(desk.address, None) for _ in range(3)]
    for version, line in enumerate(lines):
        line.say(Ready(version, "f"))
    heard = hear(desk, 3)
    assert {message.version for _, message in heard} == {0, 1, 2}
    for member, message in heard:
        desk.say(member, BlobHere(f"delta-{message.version}"), b"x" * 100_000 * message.version)
    for version, line in enumerate(lines):
        assert line.hear(5) == (BlobHere(f"delta-{version}"), b"x" * 100_000 * version)
        line.close()


def test_what_is_no_message_is_counted_and_a_word_to_someone_gone_is_lost(desk):
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://{desk.address}")
    nested = b"\x82\xa1a" + b"\x91" * 4000 + b"\x01"
    for frames in ([b"nonsense"], [b"\x81\xa4type\xa5ready"], [b"two", b"frames"], [nested]):
        stranger.send_multipart(frames)
    line = Line(desk.address, None)
    line.say(Leaving())
    (heard,) = hear(desk)
    hear_rest = []
    for _ in range(50):
        hear_rest += desk.hear(0.1)
        if desk.refused == 4:
            break
    hear_rest += desk.hear(0.3)
    assert heard[1] == Leaving()
    assert desk.refused == 4
    assert not hear_rest
    desk.say("00" * 12, Noted())
    line.close()
    stranger.close(linger=0)
    context.term()


def test_only_the_keys_of_the_run_are_let_in():
    learner, generator = zmq.curve_keypair(), zmq.curve_keypair()
    desk = Desk(HOST, CurveKeys(*learner, peers=(generator[0],)))
    welcome = Line(desk.address, CurveKeys(*generator, peers=(learner[0],)))
    strangers = [Line(desk.address, keys) for keys in (None, CurveKeys(*zmq.curve_keypair(), peers=(learner[0],)))]
    for line in (*strangers, welcome):
        line.say(Ready(1, "f"))
    ((member, message),) = hear(desk)
    assert message == Ready(1, "f")
    desk.say(member, Noted())
    assert welcome.hear(5) == (Noted(), b"")
    assert desk.hear(0.3) == []
    assert all(line.hear(0.1) is None for line in strangers)
    for line in (*strangers, welcome):
        line.close()
    desk.close()


def test_an_address_of_another_machine_is_a_clear_error():
    with pytest.raises(ConfigError, match=r"broadcast\.medium\.host must be an address of the learner's machine"):
        Desk("192.0.2.1", None)


def test_messages_are_bounded(desk):
    line = Line(desk.address, None)
    line.say(Ready(1, "f" * MAX_MESSAGE_BYTES))
    assert [desk.hear(0.05) for _ in range(10)] == [[]] * 10
    line.close()
