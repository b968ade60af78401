"""Options of the main job from file, environment and command line: every fault of theirs at once.

`run_config` is for `RunConfig` what `checked_config` is for `HiSparseConfig`. It tells all that
shows before the trace is read; what the longest request, the model's layout or a GPU asks for is
told by `Job`, which reads them. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from hisparse.config import RESIDENT, HiSparseConfig, check_sizes
from hisparse.config_check import Fault, faults_of, faulty, known_paths, unknown_key, with_fixes
from hisparse.device import check_device
from hisparse.engine.options import DECIDED, PLACES, WORKLOAD, RunConfig, sections_of
from hisparse.errors import CapacityError, ConfigError, HiSparseError
from hisparse.kv import policies

POLICIES = tuple(name for name in policies.names() if name != RESIDENT)  # that one serves nothing
PATHS = {field: path for path, field in PLACES.items()} | {n: f"run.{n}" for n in WORKLOAD}
TWICE = {"schedule.lookahead_rows": "run.spec"}  # paths of HiSparseConfig that a run fills in


def run_config(
    data: Mapping[str, Any], origins: Mapping[str, str], options: Mapping[str, Any]
) -> RunConfig:
    """What a file and the environment say (`config_sources.given`), with `options`, fields of
    RunConfig, over it.

    Raises ConfigError that names every fault at once: keys that nobody knows or that a run decides
    itself, values out of bounds in any section, and those that do not go together.
    """
    over = {*options, *(f"log.{name}" for name in options.get("log", {}))}
    origins = {path: origin for path, origin in origins.items() if _field(path) not in over}
    fields, found = _fields(data, origins)
    log = fields.get("log", {}) | options.get("log", {})
    fields |= {**options, **({"log": log} if log else {})}
    by_field = {_field(path): origin for path, origin in origins.items()}
    found |= _invalid(RunConfig, fields, by_field)
    bad = {_field(path).partition(".")[0] for path in found}
    usable = RunConfig.model_validate({n: v for n, v in fields.items() if n not in bad})
    for names, check in CHECKS:
        if bad.isdisjoint(names):
            found |= _refused(_path(names[0]), check, usable)
    # The smallest layout and length stand for those that only model and trace know.
    layout = {"row_bytes": 1, "index_row_bytes": 1, "index_groups": ((0,),)}
    raw = RunConfig.model_construct(None, **fields)
    blocks = 2 if raw.gpu_blocks is None else raw.gpu_blocks
    whole = sections_of(raw, layout, blocks, 1)
    found = _invalid(HiSparseConfig, whole, origins) | found
    found |= _too_large(whole, found)
    if found:
        raise faulty(found.values())
    return usable


def _field(path: str) -> str:
    """The name that RunConfig has for a path of file and environment."""
    return PLACES.get(path, path.removeprefix("run."))


def _path(field: str) -> str:
    return PATHS.get(field, TWICE.get(field, field))


def _fields(
    data: Mapping[str, Any], origins: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Fault]]:
    """Fields of RunConfig, and the keys that are none, by their paths."""
    known = [*known_paths(HiSparseConfig), "run", *(f"run.{name}" for name in WORKLOAD)]
    found: dict[str, Fault] = {}
    fields: dict[str, Any] = {}
    more: dict[str, dict[str, Any]] = {}
    for path, origin in origins.items():
        section, _, name = path.partition(".")
        decided = next((p for p in DECIDED if path == p or path.startswith(f"{p}.")), None)
        if decided is not None:  # of a whole section, one reason
            why = f"`hisparse run` takes no {decided}, {DECIDED[decided]}: leave it out"
            found[f"{decided} {origin}"] = Fault(decided, f"{decided} (from {origin}): {why}", {})
        elif path not in known or (name and not isinstance(data.get(section), Mapping)):
            why = unknown_key(path, known)
            found[path] = Fault(path, f"{path} (from {origin}): {why}", {path: None})
        elif not name:
            found[path] = Fault(
                path, f"{path} (from {origin}): is a section: give fields of it", {}
            )
        elif section == "log":
            fields.setdefault("log", {})[name] = data[section][name]
        elif path in PLACES or section == "run":
            fields[_field(path)] = data[section][name]
        else:
            more.setdefault(section, {})[name] = data[section][name]
    return fields | ({"more": more} if more else {}), found


def _invalid(
    model: type[BaseModel], data: Mapping[str, Any], origins: Mapping[str, str]
) -> dict[str, Fault]:
    """What `model` refuses of `data`, by the path of file and environment."""
    try:
        model.model_validate(data)
    except ValidationError as error:
        return {_path(fault.path): fault for fault in faults_of(error, model, origins)}
    return {}


def _too_large(whole: Mapping[str, Any], found: Mapping[str, Fault]) -> dict[str, Fault]:
    """Sizes that no machine has, where the other faults can be mended."""
    fixes = {_path(p): value for fault in found.values() for p, value in fault.fixes.items()}
    ours = {p: value for p, value in fixes.items() if "." in p and p.partition(".")[0] in whole}
    try:
        check_sizes(HiSparseConfig.model_validate(with_fixes(whole, ours)))
    except ValidationError:
        return {}
    except CapacityError as error:
        return {"sizes": Fault("sizes", str(error), error.fixes)}
    return {}


def _refused(path: str, check: Callable[[RunConfig], None], config: RunConfig) -> dict[str, Fault]:
    try:
        check(config)
    except HiSparseError as error:
        return {path: Fault(path, str(error), {})}
    return {}


def refuse_unknown_device(config: RunConfig) -> None:
    """Raises ConfigError, with the accepted names, and DeviceError for one that is refused."""
    check_device(config.device)


def refuse_unknown_policy(config: RunConfig) -> None:
    """Raises ConfigError, with the accepted names, for a policy that nobody knows."""
    if config.policy == RESIDENT:
        raise ConfigError(
            f"policy={RESIDENT!r} has no host tier to run: use one of {', '.join(POLICIES)}; every "
            "run compares with an all-resident pool anyway"
        )
    policies.resolve(config.policy)


def refuse_used_log(config: RunConfig) -> None:
    """A run starts at seq 1. Checked before the oracle's minutes, and before a writer could touch
    the old log: opening one for writing moves a torn tail aside. Raises ConfigError."""
    log = config.log
    if log.mode == "disk" and log.dir is not None and any(log.dir.glob("*/*.seg")):
        raise ConfigError(
            f"log.dir={str(log.dir)!r} already holds a log: give an empty directory, or remove it"
        )


def refuse_lost_selections(config: RunConfig) -> None:
    """Selections are written beside the log. Raises ConfigError where there is no such place."""
    if config.record_selections and config.log.mode != "disk":
        raise ConfigError(
            f"record_selections={config.record_selections} needs a log on disk: give --log DIR"
        )


def refuse_mismatched(config: RunConfig) -> None:
    """Options that do not go together, all of them. Raises ConfigError."""
    found = []
    other = config.model != "builtin"
    alone = f"model={config.model!r}"
    if other and config.spec:
        found.append(
            f"spec={config.spec}: {alone} has no draft head: leave --spec at 0, or use --model "
            "builtin"
        )
    if other and config.graph:
        found.append(
            f"graph=True: {alone} has no decode step of fixed shape to capture: use --eager, or "
            "--model builtin"
        )
    elif config.graph and config.device != "cuda":
        found.append(
            f"graph=True: device={config.device!r} has no graphs: use --device cuda, or --eager"
        )
    if other and config.device != "cpu":
        found.append(
            f"device={config.device!r}: {alone} is batch-invariant on the CPU alone: use --device "
            "cpu, or --model builtin"
        )
    if found:
        raise ConfigError("; ".join(found))


# With the fields whose defaults, in the place of faulty values, would be refused: it is left out
# where one of them is. The first is the one that the refusal is of.
CHECKS: tuple[tuple[tuple[str, ...], Callable[[RunConfig], None]], ...] = (
    (("device",), refuse_unknown_device),
    (("policy",), refuse_unknown_policy),
    (("graph",), refuse_mismatched),
    (("record_selections", "log"), refuse_lost_selections),
    (("log",), refuse_used_log),
)
