"""The one validator of configurations that come from outside: every violation at once, and advice.

`checked_config` is what an engine calls with what its user wrote. Each violation is told with its
field, value and reason, and where one can be known with a value that would do; these values,
applied together, pass.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ValidationError

from hisparse.config import HiSparseConfig, check_capacity, check_sizes
from hisparse.config_packing import packed
from hisparse.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


REQUIRED = "Field required"  # as pydantic says it


class Fault(NamedTuple):
    """What is wrong with one field, told with its value, where that is from, and the reason."""

    path: str
    text: str
    fixes: Mapping[str, object]


def checked_config(
    data: Mapping[str, Any], origins: Mapping[str, str] | None = None
) -> HiSparseConfig:
    """The one validator for what comes from outside, nested as `HiSparseConfig` is; chooses the
    shape of the blocks (`config_packing`) where the data does not. `origins` says where a value is
    from, by its path.

    Raises ConfigError that names every violation at once, those included that show only when others
    are mended; its `fixes`, where each has one, make the configuration pass.
    """
    reasons: list[str] = []
    fixes: dict[str, object] = {}
    while True:
        try:
            config = check_sizes(HiSparseConfig.model_validate(with_fixes(data, fixes)))
            config = packed(config)
            check_capacity(config)
        except ValidationError as error:
            told, known = _joined(faults_of(error, HiSparseConfig, origins or {}))
        except CapacityError as error:
            told, known = [str(error)], error.fixes
        else:
            break
        reasons += [reason for reason in told if reason not in reasons]
        if not known.items() - fixes.items():
            break  # the rest has no value that we could know
        fixes |= known
    if reasons:
        raise ConfigError("; ".join(reasons), fixes)
    return config


def usable_config(config: HiSparseConfig | Mapping[str, Any]) -> HiSparseConfig:
    """`config`, checked: a mapping is nested as `HiSparseConfig` is, and gets its blocks packed.

    Raises ConfigError that names field, value and fix; also for a policy without a host tier.
    """
    if not isinstance(config, HiSparseConfig | Mapping):
        raise ConfigError(
            f"config={config!r} must be a HiSparseConfig, or a mapping of its sections: "
            "HiSparseConfig.load(path) reads a file"
        )
    made = check_capacity(config) if isinstance(config, HiSparseConfig) else checked_config(config)
    if not made.offload:
        raise ConfigError(
            f"policy.name={made.policy.name!r} has no host tier, so there is nothing to embed: use "
            "'hybrid', or another policy that offloads",
            {"policy.name": "hybrid"},
        )
    return made


def with_fixes(data: Mapping[str, Any], fixes: Mapping[str, object]) -> dict[str, Any]:
    """`data` with fields replaced, each named by its path; None leaves a field out."""
    fixed = {name: dict(part) if isinstance(part, Mapping) else part for name, part in data.items()}
    for path, value in fixes.items():
        section, _, name = path.partition(".")
        if not name:
            place: dict[str, Any] = fixed
        else:
            held = fixed.get(section)
            place = held if isinstance(held, dict) else {}
            fixed[section] = place
        if value is None:
            place.pop(name or section, None)
        else:
            place[name or section] = value
    return fixed


def _fixes(fault: ErrorDetails) -> dict[str, object]:
    """What a fault's own bounds say would do, by the path of its field."""
    path, bounds = ".".join(str(p) for p in fault["loc"]), fault.get("ctx", {})
    if "fixes" in bounds:
        return dict(bounds["fixes"])
    if fault["type"] == "extra_forbidden":
        return {path: None}
    for bound, by in (("ge", 0), ("le", 0), ("gt", 1), ("lt", -1)):
        if bound in bounds:
            return {path: bounds[bound] + by}
    if fault["type"] == "literal_error":
        return {path: re.findall(r"'([^']*)'", bounds["expected"])[0]}
    return {}


def known_paths(model: type[BaseModel], before: str = "") -> list[str]:
    """Every section and field of `model`, by its path."""
    found = []
    for name, field in model.model_fields.items():
        found.append(f"{before}{name}")
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += known_paths(inner, f"{before}{name}.")
    return found


def unknown_key(path: str, known: Iterable[str]) -> str:
    """What to say of a key that nobody knows: the nearest of its section, or else of any."""
    known = list(known)
    section, _, name = path.rpartition(".")
    beside = {one: one for one in known if one.rpartition(".")[0] == section}
    leaves = {one.rpartition(".")[2]: one for one in reversed(known)}
    for names in ({one.rpartition(".")[2]: one for one in beside}, leaves):
        if nearest := difflib.get_close_matches(name, names, n=1):
            return f"no such key: did you mean {names[nearest[0]]}?"
    return f"no such key: known are {', '.join(beside or leaves)}"


def config_error(
    error: ValidationError,
    model: type[BaseModel] = HiSparseConfig,
    origins: Mapping[str, str] | None = None,
) -> ConfigError:
    """A pydantic error as one line: field path, value, where it is from, and reason of each fault;
    of a key that `model` does not have, the nearest that it has."""
    return faulty(faults_of(error, model, origins or {}))


def faulty(faults: Iterable[Fault]) -> ConfigError:
    """The error that tells all of them."""
    told, fixes = _joined(faults)
    return ConfigError("; ".join(told), fixes)


def _joined(faults: Iterable[Fault]) -> tuple[list[str], dict[str, object]]:
    told: list[str] = []
    fixes: dict[str, object] = {}
    for fault in faults:
        told.append(fault.text)
        fixes |= fault.fixes
    return told, fixes


def faults_of(
    error: ValidationError, model: type[BaseModel], origins: Mapping[str, str]
) -> list[Fault]:
    """The faults in a pydantic error of `model`."""
    found = []
    for fault in error.errors():
        path = ".".join(str(p) for p in fault["loc"]) or "config"
        shown = fault["input"]
        value = f"={shown!r}" if not isinstance(shown, dict | BaseModel) else ""
        reason = fault["msg"].removeprefix("Value error, ")
        origin = origins.get(path, "")
        if fault["type"] == "extra_forbidden":
            reason = unknown_key(path, known_paths(model))
            below = {o for at, o in origins.items() if at.startswith(f"{path}.")}
            origin = origin or ", ".join(sorted(below))
        elif fault["type"] == "missing" and (wanted := _required(model, path)):
            reason += f" ({wanted})"
        text = f"{path}{value}{f' (from {origin})' if origin else ''}: {reason}"
        found.append(Fault(path, text, _fixes(fault)))
    return found


def _required(model: type[BaseModel], section: str) -> str:
    """Fields that a section of `model` cannot be without; empty for what is no section."""
    field = model.model_fields.get(section)
    inner = field and field.annotation
    if not isinstance(inner, type) or not issubclass(inner, BaseModel):
        return ""
    return ", ".join(name for name, part in inner.model_fields.items() if part.is_required())
