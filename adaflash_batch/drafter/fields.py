"""The fields of a drafter's config.json, read with their types; what is wrong is said by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaflash_batch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fields:
    """config.json with its two places for DFlash's own fields: top level and `dflash_config`.

    Attributes:
        raw: the parsed file.
        where: the folder, for messages.
    """

    raw: Mapping[str, Any]
    where: str

    def refuse(self, problem: str, hint: str | None = None) -> ConfigError:
        """The error to raise."""
        return ConfigError(f"drafter {self.where}: {problem}", hint)

    def get(self, name: str) -> Any:
        """The field's value or None. Raises ConfigError when the two places differ."""
        nested = self.raw.get("dflash_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise self.refuse(f"dflash_config in config.json is {nested!r}, not an object")
        inner, outer = (nested or {}).get(name), self.raw.get(name)
        if inner is not None and outer is not None and inner != outer:
            raise self.refuse(
                f"{name} is {outer!r} at the top of config.json and {inner!r} in dflash_config"
            )
        return outer if inner is None else inner

    def integer(self, name: str) -> int:
        """A field that must be there and be a whole number."""
        value = self._present(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(f"{name} in config.json is {value!r}, not a whole number")
        return value

    def number(self, name: str) -> float:
        """A field that must be there and be a number."""
        value = self._present(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(f"{name} in config.json is {value!r}, not a number")
        return float(value)

    def boolean(self, name: str) -> bool:
        """A field that must be there and be true or false."""
        value = self._present(name)
        if not isinstance(value, bool):
            raise self.refuse(f"{name} in config.json is {value!r}, not true or false")
        return value

    def text(self, name: str) -> str:
        """A field that must be there and be a string."""
        value = self._present(name)
        if not isinstance(value, str):
            raise self.refuse(f"{name} in config.json is {value!r}, not a name")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A field that is a list of numbers; () where it is missing."""
        value = self.get(name) or []
        if not isinstance(value, list) or any(type(item) not in (int, float) for item in value):
            raise self.refuse(f"{name} in config.json is {value!r}, not a list of numbers")
        return tuple(float(item) for item in value)

    def integers(self, name: str) -> tuple[int, ...]:
        """A field that must be there and be a list of whole numbers."""
        value = self._present(name)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise self.refuse(f"{name} in config.json is {value!r}, not a list of whole numbers")
        return tuple(value)

    def _present(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise self.refuse(
                f"config.json has no {name}", "It is never guessed: ask the drafter's authors"
            )
        return value
