"""config.json, read field by field, with transformers' defaults for what the file leaves out.

A field that is absent or null takes the default. A value that is not implemented is an error that names field and
value: a setting is never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from models.errors import ConfigError


class Config:
    """The fields of one config.json, or of one of its sections."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def read(self, name: str, default: object) -> object:
        """The field as it stands, or `default` where it is absent or null."""
        value = self._fields.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._fields.get(name) is not None

    def integer(self, name: str, default: int, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        value = self.read(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {minimum}")
        return value

    def optional_integer(self, name: str, default: int) -> int | None:
        """As `integer`, but null is a value of its own: none."""
        return None if self.null(name) else self.integer(name, default)

    def number(self, name: str, default: float) -> float:
        """A number."""
        value = self.read(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} is {value!r}; it must be a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.read(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be true or false")
        return value

    def one_of(self, name: str, default: object, *implemented: object) -> object:
        """A value out of a list; anything else is refused."""
        value = self.read(name, default)
        if value not in implemented:
            raise ConfigError(f"{name} is {value!r}; implemented: {', '.join(map(repr, implemented))}")
        return value

    def strings(self, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """A list of strings."""
        value = self.read(name, default)
        if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
            raise ConfigError(f"{name} is {value!r}; it must be a list of strings")
        return tuple(value)

    def integers(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self.read(name, default)
        if not isinstance(value, list | tuple) or not all(type(entry) is int for entry in value):
            raise ConfigError(f"{name} is {value!r}; it must be a list of whole numbers")
        return tuple(value)

    def section(self, name: str, inherited: tuple[str, ...] = ()) -> Config:
        """The nested object `name`; empty when absent. `inherited` fields of this one, where set, override it."""
        value = self.read(name, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{name} is {value!r}; it must be an object")
        return Config({**value, **{field: self._fields[field] for field in inherited if self.has(field)}})

    def numbers(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """A list of as many numbers as `default` has."""
        value = self.read(name, default)
        if not isinstance(value, list | tuple) or len(value) != len(default) or not all(map(_is_number, value)):
            raise ConfigError(f"{name} is {value!r}; it must be a list of {len(default)} numbers")
        return tuple(float(entry) for entry in value)

    def null(self, name: str) -> bool:
        """Whether the field is there and null, where that has a meaning of its own."""
        return name in self._fields and self._fields[name] is None

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise ConfigError for a field whose value contradicts others."""
        raise ConfigError(f"{name} is {self._fields.get(name)!r}: {why}")

    def names(self) -> frozenset[str]:
        """The fields that are there and not null."""
        return frozenset(name for name in self._fields if self.has(name))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
