"""A user's reward functions, good and bad, for tests of the pool; imported by path in the scoring processes."""

import asyncio
import contextlib
import os
import re
import sys
import time


def length(prompt, text):
    return float(len(text))


def is_right(prompt, text):
    return text == prompt.answer


async def slowly(prompt, text):
    await asyncio.sleep(0.01)
    return 2.0


def takes_its_time(prompt, text):
    time.sleep(0.1)
    return 1.0


num_waiting = 0


async def num_together(prompt, text):
    """How many samples were being judged as this one came, itself included."""
    global num_waiting  # noqa: PLW0603 - a user's module may
    if text == "raise":
        raise ValueError(text)
    num_waiting += 1
    seen = num_waiting
    await asyncio.sleep(0.05)
    num_waiting -= 1
    return float(seen)


def on_demand(prompt, text):
    """Do what the completion says; 1 where that has no result."""
    act = ACTS.get(text)
    result = act() if act else None
    return 1.0 if result is None else float(result)


def raising(error):
    """Return what raises it."""

    def act():
        raise error

    return act


class Silent(Exception):  # noqa: N818 - what a library might raise
    """Has no words."""

    def __str__(self):
        raise KeyError("no words")


def make_noise():
    sys.stdout.write("noise on standard output\n")
    os.write(1, b"more noise\n")


def write_everywhere(payload):
    """Write into every descriptor of the process, its socket and its mark among them."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, payload)


async def on_demand_later(prompt, text):
    """As `on_demand`; or wait for as many seconds as the completion says, or for ever, also where it is cancelled."""
    await asyncio.sleep(float(text) if text.replace(".", "").isdigit() else 0.001)
    while text.startswith("never"):
        with contextlib.suppress(asyncio.CancelledError if text == "never gives up" else ()):
            await asyncio.Event().wait()
    return on_demand(prompt, text)


def score_batch(prompts, texts):
    """Right answers, with ways to fail."""
    if "raise" in texts:
        raise KeyError("no such thing")
    if "die" in texts:
        os._exit(3)
    if "sizes" in texts:
        return []
    return [float(text == prompt.answer) for prompt, text in zip(prompts, texts, strict=True)]


ACTS = {
    "hang": lambda: time.sleep(1000),
    "backtrack": lambda: re.fullmatch(r"(a+)+b", "a" * 60),
    "die": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), 9),
    "raise": raising(KeyError("no such thing")),
    "raise at length": raising(ValueError("word " * 1_000_000)),
    "raise silent": raising(Silent()),
    "raise surrogate": raising(ValueError("\ud800")),
    "raise cancelled": raising(asyncio.CancelledError()),
    "exit": lambda: sys.exit(1),
    "hog": lambda: len([bytearray(64 << 20) for _ in range(1000)]),
    "noise": make_noise,
    "write junk": lambda: write_everywhere(b"\x04\0\0\0junk" * 4),
    "write a length": lambda: write_everywhere(b"\xff\xff\xff\x7fjunkjunkjunk"),
    "write judgements": lambda: write_everywhere(b"\x51\0\0\0\xdc\0\x28" + b"\x81\xa0" * 39),
    "write one twice": lambda: write_everywhere(b"\x13\0\0\0\x92" + b"\x81\xa6number\x01" * 2),
    "write a function": lambda: write_everywhere(b"\x11\0\0\0\x91\x82\xa6number\x01\xa4late\x91\x63"),
    "flood": lambda: sys.stdout.write("flood " * 500_000) and None,
    "pid": os.getpid,
    "torch": lambda: "torch" in sys.modules,
}
