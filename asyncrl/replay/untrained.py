"""The samples that no step trained, as a run with `observe.record = "all"` keeps them between its decisions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncrl.buffer.buffer import Untrained
from asyncrl.observe.decisions import RECORD_FOLDER, UNTRAINED, read_journal


def untrained(run_folder: Path, until: int | None = None) -> Iterator[tuple[int, int, Untrained]]:
    """Yield the samples that no step trained, as they were lost.

    Each comes with the number of the controller's life (0: the first) and the optimizer step that was done next.

    Args:
        run_folder: Of a run with `observe.record = "all"`; of another nothing is yielded.
        until: The last such step; None: go to the end, where samples lost after the last step of a life of the controller have
            -1.
    """
    decode = msgspec.msgpack.Decoder(Untrained).decode
    for path in sorted((run_folder / RECORD_FOLDER).glob("decisions-*.bin")):
        waiting, life = list[Untrained](), int(path.stem.rpartition("-")[2])
        if (journal := read_journal(path)) is None:
            continue
        for chunk in journal.chunks:
            if until is not None and chunk.step > until:
                break
            waiting += [decode(event) for name, _, event, _ in journal.entries(chunk) if name == UNTRAINED]
            if chunk.step >= 0:
                yield from ((life, chunk.step, one) for one in waiting)
                waiting.clear()
        if until is None:
            yield from ((life, -1, one) for one in waiting)
