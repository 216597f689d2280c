"""Silence, and what is not held against anyone."""

from __future__ import annotations

from asyncrl.config.run import SupervisionConfig
from asyncrl.control.life_events import ProcessSilent, StartTimeout
from asyncrl.control.signs_of_life import SignsOfLife

CONFIG = SupervisionConfig(heartbeat_s=1.0, heartbeat_timeout_s=10.0, start_timeout_s=100.0)


def looked_at_every_second(signs: SignsOfLife, since: int, until: int) -> list[ProcessSilent | StartTimeout]:
    return [late for second in range(since, until + 1) for late in signs.overdue(float(second))]


def test_silence_counts_from_the_last_beat() -> None:
    signs = SignsOfLife(CONFIG)
    signs.started("a", 0.0)
    signs.beat("a", 5.0)
    assert looked_at_every_second(signs, 0, 15) == []
    assert signs.overdue(16.0) == [ProcessSilent("a", 11.0)]


def test_first_beat_may_take_as_long_as_a_start() -> None:
    signs = SignsOfLife(CONFIG)
    signs.started("a", 0.0)
    assert looked_at_every_second(signs, 0, 100) == []
    assert signs.overdue(101.0) == [StartTimeout("a", 101.0)]


def test_new_incarnation_is_given_time_to_start_again() -> None:
    signs = SignsOfLife(CONFIG)
    signs.started("a", 0.0)
    signs.beat("a", 1.0)
    signs.started("a", 2.0)
    assert looked_at_every_second(signs, 0, 90) == []


def test_gone_and_unknown_processes_are_never_late() -> None:
    signs = SignsOfLife(CONFIG)
    signs.beat("stranger", 0.0)
    signs.started("a", 0.0)
    signs.beat("a", 0.0)
    signs.gone("a")
    assert looked_at_every_second(signs, 0, 300) == []


def test_time_in_which_nobody_listened_is_not_held_against_anyone() -> None:
    signs = SignsOfLife(CONFIG)
    signs.started("a", 0.0)
    signs.beat("a", 4.0)
    assert looked_at_every_second(signs, 0, 5) == []
    assert signs.overdue(95.0) == []
    assert looked_at_every_second(signs, 96, 99) == []
    assert looked_at_every_second(signs, 100, 110) != []
