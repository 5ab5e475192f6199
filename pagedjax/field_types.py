"""Whether the values of a record's fields are of the types that it declares."""

from __future__ import annotations

import functools
import numbers
import os
import typing
from pathlib import Path
from types import NoneType
from typing import Any

# What a declared type is called, and what passes as one: numpy's numbers and any path do, too.
_PASSES: dict[type, tuple[str, type]] = {
    bool: ("True or False", bool),
    int: ("an integer", numbers.Integral),
    float: ("a number", numbers.Real),
    str: ("text", str),
    Path: ("a path", os.PathLike),
    NoneType: ("None", NoneType),
}


def check_field_types(record: Any) -> None:
    """Refuse values that are not of their field's type. A boolean is not a number.

    Args:
        record: a dataclass whose fields are of the types bool, int, float, str, Path and None, or
            unions of them.

    Raises:
        ValueError: a field holds something else; the text names field, wanted and got.
    """
    for name, kinds in _field_kinds(type(record)).items():
        value = getattr(record, name)
        if not any(_is_a(value, kind) for kind in kinds):
            wanted = " or ".join(_PASSES[kind][0] for kind in kinds)
            raise ValueError(f"{name} must be {wanted}, got {value!r}")


@functools.cache
def _field_kinds(record_type: type) -> dict[str, tuple[type, ...]]:
    """The types that each field may have."""
    hints = typing.get_type_hints(record_type)
    return {name: typing.get_args(hint) or (hint,) for name, hint in hints.items()}


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, _PASSES[kind][1]) and (kind is bool or not isinstance(value, bool))
