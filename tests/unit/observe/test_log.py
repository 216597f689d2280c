"""One line an event, with its process."""

import subprocess
import sys


def test_lines_name_process_and_module_and_debug_stays_out() -> None:
    program = (
        "import logging\n"
        "from asyncrl.observe.log import set_up_logging\n"
        "set_up_logging('generator-0')\n"
        "log = logging.getLogger('asyncrl.generate')\n"
        "log.info('up'); log.debug('detail')\n"
        "logging.getLogger('other').info('chatter'); logging.getLogger('other').warning('ours too')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("INFO    generator-0 asyncrl.generate | up")
    assert lines[1].endswith("WARNING generator-0 other | ours too")
    assert not done.stdout
