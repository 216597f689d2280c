"""Samples that no step trained, as a run with `observe.record = "all"` records them between its decisions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncrl.buffer.buffer import Untrained
from asyncrl.errors import ConfigError
from asyncrl.observe.decisions import RECORD_FOLDER, UNTRAINED, Entry, Journal, read_journal, recordings


def untrained(run_folder: Path, until: int | None = None) -> Iterator[tuple[int, int, Untrained]]:
    """Yield the samples that no step trained, in the order in which they were lost.

    Each comes with the number of the controller's life (0: the first) and the optimizer step that was done next.

    Args:
        run_folder: Folder of a run with `observe.record = "all"`; other runs yield nothing.
        until: The last such step; None: go to the end; samples lost after the last step of a life of the controller have step
            -1.
    """
    for life, path in recordings(run_folder / RECORD_FOLDER).items():
        waiting = list[Untrained]()
        if (journal := read_journal(path)) is None:
            continue
        for chunk in journal.chunks:
            if until is not None and chunk.step > until:
                break
            waiting += [decoded(journal, entry) for entry in journal.entries(chunk) if entry[0] == UNTRAINED]
            if chunk.step >= 0:
                yield from ((life, chunk.step, one) for one in waiting)
                waiting.clear()
        if until is None:
            yield from ((life, -1, one) for one in waiting)


def decoded(journal: Journal, entry: Entry) -> Untrained:
    """Return the content of such an entry of a recording.

    Raises:
        ConfigError: The entry cannot be read.
    """
    try:
        return msgspec.msgpack.decode(entry[2], type=Untrained)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{journal.path} has samples that this version of asyncrl cannot read: {error}") from error
