"""Strict reading of a configuration: every field is taken, known to be harmless, or refused."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from convert.source import CheckpointError

_REQUIRED = object()


class Fields:
    """A configuration that is read once, field by field.

    A field that nobody takes could change the maths; `finish` refuses it by name, so that a
    model is never run as something that it is not. A null says nothing and counts as absent.

    Args:
        data: names and values.
        where: what the errors call it, such as `config.json`.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self._stated = frozenset(data)
        self._left = {name: value for name, value in data.items() if value is not None}
        self.where = where
        self.notes: list[str] = []

    def states(self, name: str) -> bool:
        """Whether the configuration has the field at all, be it null."""
        return name in self._stated

    def note(self, text: str) -> None:
        """Keep a remark for the person who converts, such as a default that was assumed."""
        self.notes.append(f"{self.where}: {text}")

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The field's value as it stands.

        Raises:
            CheckpointError: it is absent and has no default.
        """
        if name in self._left:
            return self._left.pop(name)
        if default is _REQUIRED:
            raise CheckpointError(f"{self.where} lacks {name!r}")
        return default

    def take_int(self, name: str, default: Any = _REQUIRED) -> Any:
        """A whole number (65536.0 is one), or the default."""
        value = self.take(name, default)
        if value is default:
            return value
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise self._unfit(name, value, "a whole number")
        return int(value)

    def take_float(self, name: str, default: Any = _REQUIRED) -> Any:
        """A finite number, also spelled as text as some configurations do, or the default."""
        value = self.take(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise self._unfit(name, value, "a number")
        try:
            number = float(value)
        except ValueError:
            raise self._unfit(name, value, "a number") from None
        if not math.isfinite(number):
            raise self._unfit(name, value, "a finite number")
        return number

    def take_bool(self, name: str, default: Any = _REQUIRED) -> Any:
        """True or False, or the default."""
        value = self.take(name, default)
        if value is not default and not isinstance(value, bool):
            raise self._unfit(name, value, "true or false")
        return value

    def take_text(self, name: str, default: Any = _REQUIRED) -> Any:
        """A string, or the default."""
        value = self.take(name, default)
        if value is not default and not isinstance(value, str):
            raise self._unfit(name, value, "a text")
        return value

    def take_mapping(self, name: str) -> dict[str, Any]:
        """An object; absent and null are the empty one."""
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise self._unfit(name, value, "an object")
        return {key: entry for key, entry in value.items() if entry is not None}

    def require(self, name: str, *allowed: Any) -> None:
        """Refuse any value but `allowed`; absence is fine."""
        value = self.take(name, allowed[0])
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            wanted = " or ".join(repr(one) for one in allowed)
            raise CheckpointError(f"{self.where}: {name}={value!r} is not supported, only {wanted}")

    def finish(self, ignored: Collection[str] = ()) -> None:
        """End the reading.

        Args:
            ignored: fields that say nothing about the maths.

        Raises:
            CheckpointError: a field is left that was neither taken nor ignored.
        """
        unread = {name: self._left[name] for name in sorted(set(self._left) - set(ignored))}
        if unread:
            listed = ", ".join(f"{name}={_short(value)}" for name, value in unread.items())
            raise CheckpointError(
                f"{self.where} has fields that are not understood and may change the maths: "
                f"{listed}"
            )

    def _unfit(self, name: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name} must be {wanted}, got {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
