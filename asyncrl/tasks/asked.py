"""Prompts that a caller requests groups for during the run, instead of the task's prompts (`learner.kind = "driven"`).

A caller numbers its requests within its own streams, so a repeated request changes nothing. Groups are issued in the order of
the requests. Invariant: a request is queued, issued, ready or over (with the reason) until its group is trained, its caller was
told that the group never comes, or its stream is closed. Requests for a closed stream are refused, so a cancelled request that
arrives late leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.errors import RunError
from asyncrl.schema.samples import Progress, Prompt
from asyncrl.schema.status import GroupsAsked

MOST_QUEUED = 1 << 16
"""Maximum number of prompts that wait to be issued."""
MOST_CLOSED = 1024
"""Number of closed streams that are remembered."""
MOST_OVER = 1 << 14
"""Number of groups that became ready, can no longer be trained, and whose reason is remembered."""
CLOSED = "this stream is closed; open another"


@dataclass(slots=True, eq=False)
class Asked:
    """One requested group."""

    stream: str
    number: int
    prompt: Prompt
    size: int
    max_new_tokens: int
    """0: the value of the config."""
    is_followed: bool = False
    pieces: list[Progress] = field(default_factory=list)
    """Its tokens so far, if a caller follows it."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a piece arrives, and at its end."""
    group_id: int = -1
    """-1: not issued yet."""
    oldest: int = -1
    """Version of its oldest token, as far as known."""
    is_ready: bool = False
    why_over: str = ""
    """Empty while it can still be trained."""


class AskedPrompts:
    """Requested groups, by stream and number."""

    def __init__(self) -> None:
        self.moved = asyncio.Event()
        """Set, and replaced by a new event, when a group becomes ready or over."""
        self.num_waiting = 0
        """Number of callers that wait for groups; if 0, the run waits for the callers."""
        self.queue: deque[Asked] = deque()
        """Requests that wait to be issued, oldest first."""
        self.by_group: dict[int, Asked] = {}
        """Requests with an issued group, by group id."""
        self._streams: dict[str, dict[int, Asked]] = {}
        self._closed: deque[str] = deque(maxlen=MOST_CLOSED)
        self._over: deque[int] = deque()
        """Groups that became ready and are now over, oldest first."""

    def enter(self, asked: GroupsAsked) -> list[Asked]:
        """Queue the new requests; return all of them. Groups that are over and come before the first were delivered: forget them.

        Raises:
            RunError: The stream is closed, too many prompts are queued, or an unknown request has no prompt.
        """
        if asked.stream in self._closed:
            raise RunError(CLOSED)
        stream = self._streams.get(asked.stream, {})
        first = min((one.number for one in asked.groups), default=0)
        # A group that became ready stays: its caller may still try to train it, and then gets the reason why that is impossible.
        for given in [one for number, one in stream.items() if number < first and one.why_over and not one.is_ready]:
            del stream[given.number], self.by_group[given.group_id]
        for one in asked.groups:
            if one.number in stream:
                continue
            if one.prompt is None:
                raise RunError(f"group {one.number} of stream {asked.stream} is over; ask for another")
            if len(self.queue) >= MOST_QUEUED:
                raise RunError(f"{MOST_QUEUED} prompts wait to be issued, which is the most that may")
            known = Asked(asked.stream, one.number, one.prompt, one.size, one.max_new_tokens, one.is_followed)
            self._streams.setdefault(asked.stream, stream)[one.number] = known
            self.queue.append(known)
        return [stream[one.number] for one in asked.groups]

    def issued(self, asked: Asked, group_id: int, version: int) -> None:
        """Note that a group was issued, under this version."""
        asked.group_id, asked.oldest = group_id, version
        self.by_group[group_id] = asked

    def progress(self, piece: Progress) -> None:
        """Note further tokens of a group, for the caller that follows it."""
        if asked := self.by_group.get(piece.group_id):
            asked.pieces.append(piece)
            asked.news.set()

    def ready(self, group_id: int, oldest: int) -> None:
        """Note that a group is ready to be trained."""
        if asked := self.by_group.get(group_id):
            asked.is_ready, asked.oldest = True, oldest
            asked.news.set()
            self.wake()

    def over(self, group_id: int, reason: str) -> None:
        """Note that a group will never be trained."""
        if asked := self.by_group.get(group_id):
            asked.why_over = reason if reason.startswith("failed") else f"{reason}; its oldest token is of version {asked.oldest}"
            asked.news.set()
            self.wake()
            if asked.is_ready:
                self._over.append(group_id)
            if len(self._over) > MOST_OVER:
                self.forget([self._over.popleft()])

    def wake(self) -> None:
        """Wake all waiting callers, so that they check again."""
        self.moved.set()
        self.moved = asyncio.Event()

    def settled(self, asked: GroupsAsked) -> list[Asked]:
        """Return the first requests that are ready or over; none while there are fewer than the requested minimum.

        Raises:
            RunError: The stream was closed after the request.
        """
        stream, first = self._streams.get(asked.stream), list[Asked]()
        if stream is None or asked.stream in self._closed:
            raise RunError(CLOSED)
        for one in asked.groups:
            known = stream.get(one.number)
            if known is None or not (known.is_ready or known.why_over):
                break
            first.append(known)
        return first if len(first) >= min(asked.at_least, len(asked.groups)) else []

    def forget(self, group_ids: Iterable[int]) -> None:
        """Forget ready groups that a step has taken or their caller has released."""
        for group_id in group_ids:
            if (one := self.by_group.get(group_id)) is not None and one.is_ready:
                del self.by_group[group_id], self._streams[one.stream][one.number]
                if not self._streams[one.stream]:
                    del self._streams[one.stream]

    def close(self, stream: str, first: int = 0) -> list[int]:
        """Close a stream and forget its groups from number `first` on; return those of them that were issued."""
        self._closed.append(stream)
        known = self._streams.pop(stream, {})
        if kept := {number: one for number, one in known.items() if number < first and one.is_ready}:
            self._streams[stream] = kept
        mine = [one for number, one in known.items() if number not in kept]
        for one in mine:
            one.why_over = one.why_over or "released"
            one.news.set()
        self.queue = deque(one for one in self.queue if one.stream != stream)
        groups = [one.group_id for one in mine if one.group_id >= 0]
        for group_id in groups:
            del self.by_group[group_id]
        if mine:
            self.wake()
        return groups
