"""Building blocks of every config struct: bounded numbers, and the two base structs."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MOST_INT, MOST_FLOAT = 1 << 53, 1e9
"""Largest numbers that every ledger, message and timer can hold; no useful duration, rate or weight is larger."""

PositiveInt = Annotated[int, Meta(ge=1, le=MOST_INT)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=MOST_INT)]
PositiveFloat = Annotated[float, Meta(gt=0, le=MOST_FLOAT)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=MOST_FLOAT)]
FiniteFloat = Annotated[float, Meta(ge=-MOST_FLOAT, le=MOST_FLOAT)]
FreeFloat = Annotated[float, Meta(gt=0)]
"""A limit; `inf` means no limit."""
Fraction = Annotated[float, Meta(gt=0, le=1)]
Device = Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,4})?)$")]
Processes = Annotated[int, Meta(ge=1, le=4096)]
"""Number of processes of one kind, or of threads of one process."""
ProcessesOrNone = Annotated[int, Meta(ge=0, le=4096)]
BoundedInt = Annotated[int, Meta(ge=1, le=1 << 20)]
"""Number of things held at once: slots, groups, samples, messages."""


class _Stage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every config struct."""


class _Variant(_Stage, frozen=True, tag_field="kind"):
    """Base of structs that are alternatives for one field, distinguished by `kind`."""

    @property
    def kind(self) -> str:
        """The tag."""
        return str(self.__struct_config__.tag)
