"""Prompts that a caller asks groups for while the run goes on, in place of the task's (`learner.kind = "driven"`).

A caller numbers what it asks for within streams of its own, so asking for the same again changes nothing. Groups are issued in
the order in which they were asked for. Invariant: what is asked for is queued, issued, ready or over (with the reason), until its
group is trained, its caller was told that it never comes, or its stream is closed; nothing of a closed stream is taken in any
more, so a request that was cancelled and comes late leaves nothing behind.
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
"""Prompts that wait to be issued."""
MOST_CLOSED = 1024
"""Closed streams that are remembered."""
MOST_OVER = 1 << 14
"""Groups that were ready and cannot be trained any more, and of which the reason is remembered."""
CLOSED = "this stream is closed; open another"


@dataclass(slots=True, eq=False)
class Asked:
    """One group that is asked for."""

    stream: str
    number: int
    prompt: Prompt
    size: int
    max_new_tokens: int
    """0: the config's."""
    is_followed: bool = False
    pieces: list[Progress] = field(default_factory=list)
    """Its tokens so far, where it is followed."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a piece came, and at its end."""
    group_id: int = -1
    """-1: not issued yet."""
    oldest: int = -1
    """Version of its oldest token, as far as it is known."""
    is_ready: bool = False
    why_over: str = ""
    """Empty while it can still be trained."""


class AskedPrompts:
    """What is asked for, by stream and number."""

    def __init__(self) -> None:
        self.moved = asyncio.Event()
        """Set, and replaced by another, whenever a group is ready or over."""
        self.num_waiting = 0
        """Callers that wait for groups; while there is none, it is the callers' turn."""
        self.queue: deque[Asked] = deque()
        """What waits to be issued, oldest first."""
        self.by_group: dict[int, Asked] = {}
        """What groups were issued for."""
        self._streams: dict[str, dict[int, Asked]] = {}
        self._closed: deque[str] = deque(maxlen=MOST_CLOSED)
        self._over: deque[int] = deque()
        """Groups that were ready, and are over since; oldest first."""

    def enter(self, asked: GroupsAsked) -> list[Asked]:
        """Queue what is not known yet; return all of these. Groups before the first of them that are over were given: let go.

        Raises:
            RunError: The stream is closed, too much is queued, or a prompt that is not known is left out.
        """
        if asked.stream in self._closed:
            raise RunError(CLOSED)
        stream = self._streams.get(asked.stream, {})
        first = min((one.number for one in asked.groups), default=0)
        # One that was ready stays: its caller may still try to train it, and is told why that cannot be.
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
        """Note further tokens of a group, for whoever follows it."""
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
        """Have everyone who waits look again."""
        self.moved.set()
        self.moved = asyncio.Event()

    def settled(self, asked: GroupsAsked) -> list[Asked]:
        """Return the first of these that are ready or over; none while there are fewer than are wanted at least.

        Raises:
            RunError: The stream was closed since they were asked for.
        """
        stream, first = self._streams.get(asked.stream), list[Asked]()
        if stream is None:
            raise RunError(CLOSED)
        for one in asked.groups:
            known = stream.get(one.number)
            if known is None or not (known.is_ready or known.why_over):
                break
            first.append(known)
        return first if len(first) >= min(asked.at_least, len(asked.groups)) else []

    def forget(self, group_ids: Iterable[int]) -> None:
        """Let go of groups that were ready, and that a step has taken or their caller has released."""
        for group_id in group_ids:
            if (one := self.by_group.get(group_id)) is not None and one.is_ready:
                del self.by_group[group_id], self._streams[one.stream][one.number]
                if not self._streams[one.stream]:
                    del self._streams[one.stream]

    def close(self, stream: str) -> list[int]:
        """Let go of a stream; return the groups that were issued for it."""
        self._closed.append(stream)
        mine = list(self._streams.pop(stream, {}).values())
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
