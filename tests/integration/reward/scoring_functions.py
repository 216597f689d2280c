"""A user's reward functions, good and bad, for tests of the pool; imported by path in the scoring processes."""

import asyncio
import contextlib
import fcntl
import os
import re
import socket
import struct
import subprocess
import sys
import termios
import time

import msgspec


def length(prompt, text):
    return float(len(text))


async def slowly(prompt, text):
    await asyncio.sleep(0.01)
    return 2.0


def takes_its_time(prompt, text):
    time.sleep(0.1)
    return 1.0


def leaves_a_daemon(prompt, text):
    """Die, and leave a process that is in no group of ours and holds the socket; its number is added to the file `text`."""
    if (daemon := os.fork()) == 0:
        os.setsid()
        time.sleep(1000)
    with open(text, "a") as pids:
        pids.write(f"{daemon}\n")
    os._exit(3)


def waits_for_a_program(prompt, text):
    """Start a program in a session of its own, write its number to the file `text`, and wait for it."""
    program = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(text, "a") as pids:
        pids.write(f"{program.pid}\n")
    program.wait()


def on_demand(prompt, text):
    """Do what the completion says; 1 where that has no result. A number is the reward."""
    if text.isdigit():
        return float(text)
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


def forge(**judgement):
    """Send a judgement, as the process does."""
    body = b"\x91" + msgspec.msgpack.encode(judgement)
    write_into_sockets(len(body).to_bytes(4, "little") + body)


def write_into_sockets(payload):
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            one.sendall(payload)


def cut_files_short():
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)


def num_unread_bytes():
    """Of what this process was sent."""
    return float(struct.unpack("i", fcntl.ioctl(int(sys.argv[1]), termios.FIONREAD, bytes(4)))[0])


def die_and_leave_a_child():
    """That holds the socket of its process."""
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(3)


async def on_demand_later(prompt, text):
    """As `on_demand`, a number after a while that is another for each.

    With a point in it, it is how many seconds to wait; `never` is for ever, also where it is cancelled.
    """
    wait_s = int(text) * 37 % 11 / 1000 if text.isdigit() else 0.001
    await asyncio.sleep(float(text) if text.replace(".", "", 1).isdigit() and "." in text else wait_s)
    while text.startswith("never"):
        with contextlib.suppress(asyncio.CancelledError if text == "never gives up" else ()):
            await asyncio.Event().wait()
    if text == "cancel own":
        asyncio.current_task().cancel()
    if text == "hog in a group":
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(bytearray, 64 << 30))
    return on_demand(prompt, text)


async def in_a_thread(prompt, text):
    await asyncio.to_thread(time.sleep, 0.5)
    return 1.0


async def never(prompt, text):
    await asyncio.Event().wait()


async def a_second(prompt, text):
    await asyncio.sleep(1.0)
    return 1.0


class Judge:
    """Is called as a function, and is async."""

    async def __call__(self, prompt, text):
        await asyncio.sleep(0.5)
        return 1.0


judge = Judge()


def slow_batch(prompts, texts):
    time.sleep(0.12 * len(texts))
    return [1.0] * len(texts)


def hangs_with_more_than_four(prompts, texts):
    """Return for each the length of the list."""
    time.sleep(1000 if len(texts) > 4 or "hang" in texts else 0)
    return [float(len(texts))] * len(texts)


def score_batch(prompts, texts):
    """Right answers, with ways to fail."""
    if "raise" in texts:
        raise KeyError("no such thing")
    if "die" in texts:
        os._exit(3)
    if "kill" in texts:
        os.kill(os.getpid(), 9)
    if "sizes" in texts:
        return []
    return [float(text == prompt.answer) for prompt, text in zip(prompts, texts, strict=True)]


ACTS = {
    "hang": lambda: time.sleep(1000),
    "backtrack": lambda: re.fullmatch(r"(a+)+b", "a" * 60),
    "die": lambda: os._exit(3),
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
    "forge a number": lambda: forge(reward=5.0, number=1 << 40),
    "forge nan": lambda: forge(reward=float("nan"), number=1),
    "forge seconds": lambda: forge(reward=1.0, seconds=float("nan"), number=1),
    "forge parts": lambda: forge(reward=1.0, parts={"mine" * 1000: 1.0}, number=1),
    "write gigabytes": lambda: write_into_sockets(b"\xff" * (4 << 20)),
    "wait for more": lambda: write_into_sockets((1 << 20).to_bytes(4, "little")),
    "cut files": cut_files_short,
    "come back twice": lambda: 2.0 if os.fork() == 0 else None,
    "die and leave a child": die_and_leave_a_child,
    "close files": lambda: os.closerange(3, 64),
    "run a loop": lambda: asyncio.run(asyncio.sleep(0.001)),
    "flood": lambda: sys.stdout.write("flood " * 500_000) and None,
    "unread": num_unread_bytes,
}
