"""What every config struct is made of: numbers within bounds, and the two kinds of struct."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class _Stage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every config struct has in common."""


class _Variant(_Stage, frozen=True, tag_field="kind"):
    """One of several under the same field, told apart by `kind`."""

    @property
    def kind(self) -> str:
        """The tag."""
        return str(self.__struct_config__.tag)
