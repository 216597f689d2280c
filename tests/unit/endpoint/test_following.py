"""Text of tokens that come one after the other, and tool calls in it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.endpoint.following import TextStream, tool_calls

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def of_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=60), st.booleans())
def test_parts_put_together_are_the_text_whatever_the_borders_of_tokens(text, sizes, has_tools):
    stream, ids, told, start = TextStream(of_bytes, has_tools=has_tools), list(text.encode()), "", 0
    for size in [*sizes, len(ids)]:
        part = stream.add(ids[start : start + size]) if start < len(ids) else ""
        assert "\ufffd" not in part or "\ufffd" in text
        told, start = told + part, start + size
    rest, calls = stream.end(of_bytes(ids))
    assert (told + rest, calls) == (text, [])


@pytest.mark.parametrize("text", ["sum: " + CALL, CALL, "a < b", "a <tool", "a <tool_call>{no json</tool_call>", CALL + CALL])
def test_what_begins_a_tool_call_is_held_back(text):
    stream, told = TextStream(of_bytes, has_tools=True), ""
    for byte in text.encode():
        told += stream.add([byte])
        assert "<tool_call" not in told
    rest, calls = stream.end(text)
    plain, called = tool_calls(text)
    assert (told + rest, [call["function"] for call in calls]) == (plain, [call["function"] for call in called])
    assert (plain == text) is (not calls)
    assert [call["function"]["name"] for call in calls] == ["add"] * text.count('"add"')
    assert len({call["id"] for call in calls}) == len(calls)


def test_forms_of_tool_calls():
    several = '<tool_call>[{"name": "f", "parameters": "{}"}, {"name": "g", "arguments": {"x": "ü"}}]'
    (first, second) = tool_calls(several)[1]
    assert (first["function"], json.loads(second["function"]["arguments"])) == ({"name": "f", "arguments": "{}"}, {"x": "ü"})
    for text in (
        "<tool_call>3</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        "<tool_call>" + "[" * 10**5,
        "",
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
    ):
        assert tool_calls(text) == (text, [])


def test_a_text_that_changes_behind_what_was_told_adds_nothing():
    stream = TextStream(of_bytes, has_tools=False)
    assert (stream.add(list(b"abc")), stream.end("xyz")) == ("abc", ("", []))
