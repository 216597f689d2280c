"""One line an event, with its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_lines_name_process_and_module_and_debug_stays_out(tmp_path: Path) -> None:
    program = (
        "import logging, pathlib\n"
        "from asyncrl.observe.log import set_up_logging\n"
        f"set_up_logging('generator-0', file=pathlib.Path({str(tmp_path / 'logs' / 'x.log')!r}))\n"
        "log = logging.getLogger('asyncrl.generate')\n"
        "log.info('up'); log.debug('detail')\n"
        "logging.getLogger('other').info('chatter'); logging.getLogger('other').warning('ours too')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("INFO    generator-0 asyncrl.generate | up")
    assert lines[1].endswith("WARNING generator-0 other | ours too")
    assert (tmp_path / "logs" / "x.log").read_text() == done.stderr
    assert not done.stdout
