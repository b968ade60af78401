"""Configuration from a file, the environment and arguments: each over the one before it, validated
alike, and every value knows where it is from.

file        TOML or JSON, sections as in `HiSparseConfig`; a section `run` is `hisparse run`'s alone
environment ``HISPARSE_POOLS__GPU_BLOCKS=300``: two underscores between section and field; lists
            and whole sections as JSON
arguments   sections as mappings

The one module of the ground floor that reads a file and the environment, and only when called.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hisparse.config import HiSparseConfig
from hisparse.config_check import checked_config
from hisparse.errors import ConfigError

PREFIX = "HISPARSE_"
RUN = "run"
# Variables of the project's own tests; none of them configures anything.
OTHERS = frozenset(
    f"HISPARSE_{name}"
    for name in ("BROWSER", "EVERY_BIT", "NVCC", "OLDEST_TRANSFORMERS", "SPIN", "WHEEL")
)
ARGUMENT = "argument"


class Given(NamedTuple):
    """What was said, nested as `HiSparseConfig` is; `origins`: by dotted path, who said it."""

    data: dict[str, Any]
    origins: dict[str, str]


def given(
    file: str | Path | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> Given:
    """What all sources say together, not validated yet. Raises ConfigError for a file that cannot
    be read, and for JSON in the environment that is none."""
    all_of = Given({}, {})
    if file is not None:
        _put(all_of, (), read_file(file), str(file))
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.upper().startswith(PREFIX) and name.upper() not in OTHERS:
            path = tuple(name[len(PREFIX) :].lower().split("__"))
            _put(all_of, path, parsed(name, text), name)
    _put(all_of, (), dict(arguments or {}), ARGUMENT)
    return all_of


def load(file: str | Path | None = None, **arguments: Any) -> tuple[HiSparseConfig, dict[str, str]]:
    """`HiSparseConfig.load`, and where each value that was given is from, by dotted path."""
    data, origins = given(file, arguments)
    data.pop(RUN, None)
    return checked_config(data, origins), origins


def read_file(file: str | Path) -> dict[str, Any]:
    """The content of a TOML (``.toml``) or JSON file. Raises ConfigError."""
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}: name a file to read") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; give JSON, or TOML in a .toml file") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds {type(data).__name__}, not sections of a configuration")
    return data


def parsed(name: str, text: str) -> Any:
    """JSON where it looks like a list or a section; all else is text, which the models convert.
    Raises ConfigError that names `name`."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}={text!r}: {error}; give JSON") from None


def _put(into: Given, path: tuple[str, ...], value: Any, origin: str) -> None:
    """`value` at `path`, over what is there; sections are joined."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            _put(into, (*path, str(name)), part, origin)
        if value or not path:
            return
    place, dotted = into.data, ".".join(path)
    for name in path[:-1]:
        if not isinstance(place.get(name), dict):
            place[name] = {}
        place = place[name]
    for below in [known for known in into.origins if known.startswith(f"{dotted}.")]:
        del into.origins[below]
    place[path[-1]] = value
    into.origins[dotted] = origin
