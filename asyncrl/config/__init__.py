"""What every config struct is made of: numbers within bounds, and the two kinds of struct."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MOST_INT, MOST_FLOAT = 1 << 53, 1e9
"""What every ledger, message and timer can hold; a float over it is no duration, rate or weight that is meant."""

PositiveInt = Annotated[int, Meta(ge=1, le=MOST_INT)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=MOST_INT)]
PositiveFloat = Annotated[float, Meta(gt=0, le=MOST_FLOAT)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=MOST_FLOAT)]
FiniteFloat = Annotated[float, Meta(ge=-MOST_FLOAT, le=MOST_FLOAT)]
FreeFloat = Annotated[float, Meta(gt=0)]
"""A limit that `inf` lifts."""
Fraction = Annotated[float, Meta(gt=0, le=1)]
Device = Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,4})?)$")]
Processes = Annotated[int, Meta(ge=1, le=4096)]
"""Of one kind, or threads of one process."""
ProcessesOrNone = Annotated[int, Meta(ge=0, le=4096)]
BoundedInt = Annotated[int, Meta(ge=1, le=1 << 20)]
"""Of what is held at once: slots, groups, samples, messages."""


class _Stage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every config struct has in common."""


class _Variant(_Stage, frozen=True, tag_field="kind"):
    """One of several under the same field, told apart by `kind`."""

    @property
    def kind(self) -> str:
        """The tag."""
        return str(self.__struct_config__.tag)
