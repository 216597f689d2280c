"""What runs inside the sandbox. Sent as text to its own interpreter (`bootstrap`): standard library only, Python 3.9 and later.

Two roles, each a driver that forks one process a test, so that no test sees what another left behind and the driver itself never
runs foreign code:

- `candidate` holds the model-written program. `run` executes it with an input and returns what it printed; `session` loads it and
  answers requests about it (call this function, read that attribute) until told to end.
- `judge` holds the task's test code, in a sandbox of its own. Every name the program defines is a `Remote` there, and using it is
  a request to a session of the candidate.

Whoever judges (the judge, or the scoring process outside) never shares a process with the program, and only plain values cross:
the program cannot know what is expected of it, cannot reach the code that compares, and cannot print or exit its way to a pass.
A `Remote` equals another `Remote` if the program says so, and never equals a plain value.

Wire, both ways: 4 bytes little-endian length, then JSON. Values: see `Wire`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

_MODULES = ("pipe", "values", "peer", "driver")
"""In the order of their imports."""


@cache
def bootstrap() -> str:
    """Return a program text for `python -c` that brings these modules along and runs the driver."""
    texts = {f"{__name__}.{name}": Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in _MODULES}
    packages = ["asyncrl", "asyncrl.reward", __name__]
    return f"""
import sys, types
for name in {packages!r}:
    sys.modules[name] = types.ModuleType(name)
for name, text in {texts!r}.items():
    sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec", dont_inherit=True), sys.modules[name].__dict__)
sys.modules[{f"{__name__}.driver"!r}].main()
"""
