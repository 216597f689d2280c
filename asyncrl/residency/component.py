"""What can be moved between device, host memory and disk: the contract that every kind of component keeps.

Invariants, for every implementation (tests/contract/test_component.py runs over all of them):
- `residence` says where its bytes are; on `disk` and `absent` it holds neither device nor host memory, on `host` no device
  memory.
- A move keeps every bit: what comes back to the device is what left it, in the same Python objects (a module's parameters stay
  the very parameters that an optimizer and a compiled graph know).
- A move that fails (no room, disk full) leaves the component whole where it was.

Called by residency/manager.py only.
"""

from __future__ import annotations

from typing import Protocol

from asyncrl.schema.control import Residence


class Component(Protocol):
    """Something with bytes that a phase may need on the device."""

    @property
    def name(self) -> str:
        """Return its name, as `ComponentMove` has it."""
        ...

    @property
    def residence(self) -> Residence:
        """Return where it is."""
        ...

    @property
    def num_bytes(self) -> int:
        """Return the bytes it takes on the device when it is there."""
        ...

    @property
    def places(self) -> frozenset[Residence]:
        """Return where it may be.

        `absent` destroys it: only what can be made anew (an engine's weights, a KV cache, a frozen model) has that.
        """
        ...

    def look(self) -> None:
        """See how large it is now: an optimizer's state grows out of its first step."""
        ...

    def move(self, to: Residence) -> None:
        """Bring it there and return once it is; blocking.

        Raises:
            ResidencyError: There is no room, or it cannot go there; it is where it was.
        """
        ...
