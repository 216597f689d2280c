"""How processes log: one line an event, on standard error, which the launcher appends to RUN/logs/<name>.log.

INFO is life-cycle and one line a step; a WARNING names a knob to turn; DEBUG is for whoever mends asyncrl itself.
Called once per process, by its entry point.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path


def set_up_logging(process: str, level: str = "INFO", file: Path | None = None) -> None:
    """Send every log record of asyncrl to standard error, and to `file` where one is given.

    Args:
        process: Name shown on each line, `generator-0`.
        level: DEBUG, INFO or WARNING.
        file: Appended to; for a process whose standard error is somebody's terminal.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    escaped = process.replace("%", "%%")
    line = f"%(asctime)s.%(msecs)03d %(levelname)-7s {escaped} %(name)s | %(message)s"
    for handler in handlers:
        handler.setFormatter(logging.Formatter(line, datefmt="%Y-%m-%d %H:%M:%S"))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("asyncrl").setLevel(level)
