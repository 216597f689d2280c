"""A generator that is slow costs the learner nothing: its step takes as long as with none, over every medium that runs here."""

import contextlib
import math
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config.broadcast import BroadcastConfig
from tests.contract.line_process import LineProcess
from tests.contract.media.learners import MEDIA, Learner, tensors_of
from tests.contract.media.medium_peer import Fetched, Order

pytestmark = pytest.mark.timed

NUM_VALUES = 1 << 19
STEP_S = 0.1
"""What the device takes."""
NUM_STEPS = 6
RUNS_S, STANDS_STILL_S = 0.02, 0.18
MOST_SLOWER = 1.05
MOST_TIMES = 8
"""Others use the machine too, for a second or two: what they cost is not there each time, and what the generator costs is."""


class TimedLearner(Learner):
    """Trains: the device computes, then the weights are published."""

    version = 0

    def step(self) -> float:
        """Return the seconds it took."""
        self.version += 1
        tensors = tensors_of(self.version, NUM_VALUES)
        started_s = time.perf_counter()
        threading.Event().wait(STEP_S)
        self.publisher.publish(self.version, tensors)
        return time.perf_counter() - started_s


@contextlib.contextmanager
def slowed(generator: LineProcess) -> Iterator[None]:
    """Let it run a tenth of the time."""
    done = threading.Event()

    def throttle() -> None:
        while not done.is_set():
            generator.process.send_signal(signal.SIGSTOP)
            done.wait(STANDS_STILL_S)
            generator.process.send_signal(signal.SIGCONT)
            done.wait(RUNS_S)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def how_much_slower(learner: TimedLearner, generator: LineProcess, config: BroadcastConfig, run_folder: Path) -> float:
    """Return the median of steps while a slow generator fetches version after version, over that of steps without."""
    alone_s: list[float] = []
    beside_s: list[float] = []
    num_whole = 0
    for _ in range(2):
        alone_s += [learner.step() for _ in range(NUM_STEPS)]
        generator.tell(Order(config, str(run_folder), learner.newest()))
        with slowed(generator):
            for _ in range(NUM_STEPS):
                beside_s.append(learner.step())
                if generator.has_spoken():
                    num_whole += not generator.hear(Fetched).error
                    generator.tell(Order(config, str(run_folder), learner.newest()))
        num_whole += not generator.hear(Fetched).error
    assert 0 < num_whole < len(beside_s), "it was to be slow, and to get something all the same"
    return statistics.median(beside_s) / statistics.median(alone_s)


@pytest.mark.parametrize("medium", MEDIA)
def test_a_slow_generator_does_not_make_the_learners_steps_longer(medium, tmp_path):
    config = BroadcastConfig(medium=MEDIA[medium], bucket_bytes=1 << 20)
    learner = TimedLearner(config, tmp_path)
    generator = LineProcess("tests.contract.media.medium_peer", "subscribe")
    learner.step()
    generator.tell(Order(config, str(tmp_path), learner.newest()))
    assert not generator.hear(Fetched).error
    measured: list[float] = []
    while len(measured) < MOST_TIMES and min(measured, default=math.inf) > MOST_SLOWER:
        measured.append(how_much_slower(learner, generator, config, tmp_path))
    generator.close()
    learner.close()
    assert min(measured) <= MOST_SLOWER, measured
