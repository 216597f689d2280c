"""A user's reward functions, good and bad, for tests of the pool; imported by path in the scoring processes."""

import asyncio
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


def on_demand(prompt, text):
    """Do what the completion says."""
    if text == "hang":
        time.sleep(1000)
    if text == "backtrack":
        re.fullmatch(r"(a+)+b", "a" * 60)
    if text == "die":
        os._exit(3)
    if text == "kill":
        os.kill(os.getpid(), 9)
    if text == "raise":
        raise KeyError("no such thing")
    if text == "exit":
        sys.exit(1)
    if text == "hog":
        hoard = [bytearray(64 << 20) for _ in range(1000)]
        return len(hoard)
    if text == "print":
        print("noise on standard output")
        os.write(1, b"more noise\n")
    if text == "pid":
        return float(os.getpid())
    if text == "torch":
        return float("torch" in sys.modules)
    return 1.0


async def hang_async(prompt, text):
    await asyncio.Event().wait()
