"""Where a job's values come from: job file, `--set` and flags, laid over each other."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from adaflash_batch.errors import ConfigError
from adaflash_batch.request import sampling_fields

_FLAG_NAMES: dict[str, str | None] = {
    "input.paths": "INPUTS",
    "input.columns": "--column",
    "output.directory": "--out",
    "output.prefix": "--output-prefix",
    "model.name": "--model",
    "sampling.logit_bias": None,
    "speculation.when": "--speculate",
    "adapt.when": "--adapt",
}
_GLOB_CHARACTERS = frozenset("*?[")


def flag_name(section: str, name: str) -> str | None:
    """The flag of a key, `INPUTS` for the argument, None for what only the job file can say."""
    prefix = "--adapt-" if section == "adapt" else "--"
    return _FLAG_NAMES.get(f"{section}.{name}", prefix + name.replace("_", "-"))


def default_output(path: str) -> str:
    """`<stem>-completions` for a file, directory, glob or URI; just `completions` for neither."""
    local = PurePosixPath(path.partition("?")[0] if "://" in path else path)
    plain = [part for part in local.parts if not _GLOB_CHARACTERS & set(part)]
    stem = PurePosixPath(plain[-1]).stem if plain else ""
    if stem in ("", ".", ".."):
        stem = Path(path or ".").resolve().name if not _GLOB_CHARACTERS & set(path) else ""
    return f"{stem}-completions" if stem else "completions"


def nearest(word: str, known: Iterable[str], listed: Iterable[str] = ()) -> str:
    """A hint: the known words most like this one, or else a list of them (or of `listed`)."""
    known = sorted(known)
    tail = word.rpartition(".")[2]
    near = (
        [name for name in known if name.rpartition(".")[2] == tail]
        or difflib.get_close_matches(word, known, n=3, cutoff=0.7)
        or [name for name in known if name.rpartition(".")[2].startswith(tail)]
    )
    if near:
        return "did you mean " + " or ".join(near) + "?"
    return "known are " + ", ".join(sorted(listed) or known)


def check_column_fields(columns: Mapping[str, str], place: str) -> None:
    """Refuse columns for fields that Sampling does not have."""
    for field in columns:
        if field not in sampling_fields():
            raise ConfigError(
                f"{place} names {field}, which is no sampling field",
                nearest(field, sampling_fields()),
            )


def parse_value(text: str) -> object:
    """A value of `--set`: TOML where it reads as such, plain text otherwise."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = document["value"]
    # A date, or lines that smuggle in further keys, can only have been meant as text.
    is_plain = isinstance(value, bool | int | float | str | list | dict) and len(document) == 1
    return value if is_plain else text


class GivenValues:
    """Values by section and key; what is added later wins, tables are merged key by key."""

    def __init__(self, keys: Mapping[str, Iterable[str]]) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self._keys = {section: frozenset(names) for section, names in keys.items()}
        self._places: dict[tuple[str, str], str] = {}

    def add_file(self, path: Path) -> None:
        """Add a TOML job file. Raises ConfigError, also for unknown keys."""
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read job file {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"job file {path} is not TOML: {error}") from None
        for section, table in document.items():
            if section not in self._keys or not isinstance(table, dict):
                raise self._unknown(section, f"in {path}")
            for name, value in table.items():
                self._put(section, name, value, f"{section}.{name} in {path}", f"in {path}")

    def add_override(self, text: str) -> None:
        """Add one `section.key=value`, or `section.key.entry=value` for keys that hold a table."""
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"--set {text} has no value", f"write --set {key}=VALUE")
        section, _, rest = key.partition(".")
        name, _, entry = rest.partition(".")
        if not name:
            raise self._unknown(key, "in --set")
        parsed = parse_value(value.strip())
        self._put(section, name, {entry: parsed} if entry else parsed, f"--set {key}", "in --set")

    def add_flag(self, key: str, value: object) -> None:
        """Add a flag by its `section.key`; None and empty lists are not there."""
        if value is None or value in ([], (), {}):
            return
        section, _, name = key.partition(".")
        flag = flag_name(section, name) or key
        self._put(section, name, value, flag, "among the flags")

    def place(self, section: str, name: str) -> str:
        """How a message names a key: with the file, or as the flag, that it was given by."""
        return self._places.get((section, name), f"{section}.{name}")

    def explain(self, error: Mapping[str, Any]) -> ConfigError:
        """The words for one entry of a pydantic ValidationError."""
        section, name, *inner = [str(part) for part in error["loc"]] + [""]
        place = self.place(section, name)
        if entry := ".".join(part for part in inner if part and part != "[key]"):
            place = f"{place}, entry {entry},"
        wanted = str(error["msg"]).removeprefix("Value error, ")
        wanted = wanted.replace("Input should be", "it should be").replace("valid tuple", "list")
        message = f"{place} is {error['input']!r}: {wanted[:1].lower()}{wanted[1:]}"
        is_unquoted = error["type"] == "string_type" and place.startswith("--set")
        return ConfigError(message, "quote it: '\"text\"'" if is_unquoted else None)

    def _put(self, section: str, name: str, value: Any, place: str, source: str) -> None:
        if name not in self._keys.get(section, ()):
            raise self._unknown(f"{section}.{name}", source)
        old = self.values.setdefault(section, {}).get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            value = {**old, **value}
        self.values[section][name] = value
        self._places[section, name] = place

    def _unknown(self, key: str, source: str) -> ConfigError:
        section, dot, _ = key.partition(".")
        ours = [f"{section}.{name}" for name in self._keys.get(section, ())]
        if not dot:
            hint = nearest(key, ours or self._keys)
        else:
            every = (f"{section}.{name}" for section in self._keys for name in self._keys[section])
            hint = nearest(key, every, listed=ours or self._keys)
        return ConfigError(f"unknown key {key} {source}", hint)
