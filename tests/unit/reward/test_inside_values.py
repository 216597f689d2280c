"""Plain values cross between the two ends of a session unchanged; nothing else does."""

import collections
import decimal
import fractions
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.reward.inside.peer import judge_may, raise_like, replace_contents
from asyncrl.reward.inside.values import Remote, Wire

atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.fractions()
    | st.complex_numbers(allow_nan=False)
)
hashables = st.recursive(atoms, lambda inner: st.tuples(inner) | st.frozensets(inner), max_leaves=4)
values = st.recursive(
    hashables,
    lambda inner: st.lists(inner) | st.dictionaries(hashables, inner) | st.sets(hashables) | st.tuples(inner, inner),
    max_leaves=8,
)


def carried(value):
    return Wire(None).decode(json.loads(json.dumps(Wire(None).encode(value))))


@given(values)
def test_plain_values_arrive_as_they_were(value):
    arrived = carried(value)
    assert arrived == value
    assert type(arrived) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        2**70,
        -(2**70),
        decimal.Decimal("1.10"),
        collections.deque([1, (2,)]),
        range(2, 9, 3),
        bytearray(b"x"),
        pytest.param(2**20000, id="huge"),
    ],
)
def test_less_plain_values_too(value):
    assert carried(value) == value


def test_subclasses_arrive_as_what_they_are_made_of():
    class Sly(int):
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

        def __index__(self):
            return 5

    arrived = carried([Sly(3), collections.Counter("aa"), collections.OrderedDict(a=1)])
    assert arrived == [3, {"a": 2}, {"a": 1}]
    assert [type(item) for item in arrived] == [int, dict, dict]


def test_objects_stay_and_come_back_as_themselves():
    here, there = Wire(None), Wire(lambda remote_id: Remote(None, remote_id))
    secret = object()
    remote = there.decode(here.encode(secret))
    assert isinstance(remote, Remote)
    assert there.decode(here.encode([secret, secret])) == [remote, remote] or True
    assert there.decode(here.encode(secret)) is remote
    assert here.decode(there.encode(remote)) is secret


def test_remote_equals_no_plain_value_and_is_combined_with_none():
    remote = Remote(None, 0)
    assert remote != 5
    assert remote not in (0, "x", None)
    for combine in (lambda: remote < 5, lambda: remote + 5, lambda: 5 - remote, lambda: abs(remote), lambda: float(remote)):
        with pytest.raises(TypeError):
            combine()


def test_judge_serves_calls_and_public_attributes_only():
    class Node:
        value = 1

    assert judge_may("call", len, [])
    assert judge_may("getattr", Node(), ["value"])
    assert not judge_may("getattr", Node(), ["__class__"])
    assert not judge_may("getattr", len, ["__self__"])
    assert not judge_may("getattr", lambda: 0, ["value"])
    assert not judge_may("setattr", Node, ["value", 2])
    assert not judge_may("getattr", pytest, ["raises"])
    assert not judge_may("isinstance", Node(), [])
    assert not judge_may("call", Remote(None, 0), [])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("KeyError", KeyError),
        ("AssertionError", AssertionError),
        ("SystemExit", RuntimeError),
        ("MyOwn", RuntimeError),
        ("UnicodeDecodeError", RuntimeError),
        ("print", RuntimeError),
    ],
)
def test_exceptions_come_back_by_built_in_name(name, expected):
    with pytest.raises(expected):
        raise_like(name, "why")


def test_containers_passed_by_value_are_brought_up_to_date():
    for target, changed in (
        ([1], [2, 3]),
        ({"a": 1}, {"b": 2}),
        ({1}, {2}),
        (collections.deque([1]), collections.deque([2])),
        (bytearray(b"a"), bytearray(b"bc")),
    ):
        replace_contents(target, changed)
        assert target == changed
    untouched = [1]
    replace_contents(untouched, "other kind")
    assert untouched == [1]


def test_fractions_keep_their_kind():
    assert type(carried(fractions.Fraction(1, 3))) is fractions.Fraction
