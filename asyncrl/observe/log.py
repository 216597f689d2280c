"""How processes log: one line an event, on standard error, which the launcher appends to RUN/logs/<name>.log.

INFO is life-cycle and one line a step; a WARNING names a knob to turn; DEBUG is for whoever mends asyncrl itself.
Called once per process, by its entry point.
"""

from __future__ import annotations

import logging


def set_up_logging(process: str, level: str = "INFO") -> None:
    """Send every log record of asyncrl to standard error.

    Args:
        process: Name shown on each line, `generator-0`.
        level: DEBUG, INFO or WARNING.
    """
    escaped = process.replace("%", "%%")
    line = f"%(asctime)s.%(msecs)03d %(levelname)-7s {escaped} %(name)s | %(message)s"
    logging.basicConfig(level=logging.WARNING, format=line, datefmt="%Y-%m-%d %H:%M:%S", force=True)
    logging.getLogger("asyncrl").setLevel(level)
