"""A process that watches its parent: out at end of file, Ctrl-C left alone."""

from __future__ import annotations

import subprocess
import sys

from asyncrl.control.parent_watch import PARENT_GONE_EXIT_CODE

WATCH = "from asyncrl.control.parent_watch import watch_parent, ignore_interrupts\nimport os, signal, time\n"


def test_end_of_stdin_ends_the_process_after_its_last_act() -> None:
    program = WATCH + "watch_parent(lambda: print('tidied', flush=True)); print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "up\n"
        child.stdin.write("whatever is said is not the end\n")
        child.stdin.flush()
        assert child.poll() is None
        child.stdin.close()
        assert child.wait(20) == PARENT_GONE_EXIT_CODE
        assert child.stdout.read() == "tidied\n"


def test_interrupt_is_left_to_the_controller() -> None:
    program = WATCH + "ignore_interrupts(); os.kill(os.getpid(), signal.SIGINT); print('still here')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "still here\n"
