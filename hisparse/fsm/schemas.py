"""JSON Schemas of the events, the wire structs and the config, and what may change in them. Pure.

Owns      the shape of ``schemas/*.json``, which are generated and checked in.
Edges     structs travel as arrays: item 0 of an event is its kind (``x-kind``), and the items after
          it are the fields named by ``x-fields``, in order. Enums carry their names as ``x-names``.
Promise   the checked-in schema of the events is the frozen format. `log_breaks` names every change
          that an old log could not survive: kinds and fields stay; new ones come last, defaulted.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

from hisparse.config import HiSparseConfig
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.wire import Acknowledgements, SparseKVOffloadCommand

Schema = dict[str, Any]
Types = tuple[type[msgspec.Struct], ...]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REF = "#/$defs/{name}"


def struct_schema(title: str, types: Types) -> Schema:
    """Schema of any one of `types`, with kinds, field names and enum names added."""
    refs, components = msgspec.json.schema_components(types, ref_template=_REF)
    for name, cls in _named_types(types).items():
        component = components[name]
        if issubclass(cls, enum.Enum):
            component["x-names"] = {member.name: member.value for member in cls}
            continue
        component["x-fields"] = [field.name for field in msgspec.structs.fields(cls)]
        if isinstance(cls.__struct_config__.tag, int):
            component["x-kind"] = cls.__struct_config__.tag
    schema = {"$schema": DIALECT, "title": title, "oneOf": list(refs), "$defs": components}
    # As a file gives it back: a default of () is [] there, and must compare equal.
    return cast(Schema, json.loads(json.dumps(schema)))


def _named_types(types: Types) -> dict[str, Any]:
    """Every struct and enum that `types` are made of, by name."""
    found: dict[str, Any] = {}
    todo: list[Any] = list(msgspec.inspect.multi_type_info(types))
    while todo:
        info = todo.pop()
        if isinstance(info, msgspec.inspect.StructType | msgspec.inspect.EnumType):
            if info.cls.__name__ in found:
                continue
            found[info.cls.__name__] = info.cls
        for name in ("fields", "item_types", "types"):
            todo += getattr(info, name, ())
        todo += [getattr(info, name) for name in ("type", "item_type") if hasattr(info, name)]
    return found


def events_schema(types: Types = EVENT_TYPES) -> Schema:
    """Schema of a log's events."""
    return struct_schema("Events of a hisparse log", types)


def wire_schema() -> Schema:
    """Schema of what crosses scheduler <-> worker."""
    return struct_schema("Messages between scheduler and worker", WIRE_TYPES)


def config_schema() -> Schema:
    """Schema of `HiSparseConfig`."""
    return {"$schema": DIALECT, **HiSparseConfig.model_json_schema()}


WIRE_TYPES: Types = (SparseKVOffloadCommand, Acknowledgements)
SCHEMAS: dict[str, Callable[[], Schema]] = {
    "events.json": events_schema,
    "wire.json": wire_schema,
    "config.json": config_schema,
}


def as_text(schema: Schema) -> str:
    """The bytes that are checked in: the same for the same declarations."""
    return json.dumps(schema, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


# -- what an old log survives ---------------------------------------------------------------------


def log_breaks(frozen: Schema, current: Schema) -> list[str]:
    """Why a log written under `frozen` could not be read under `current`; [] if it can."""
    old, new = _by_kind(frozen), _by_kind(current)
    found: list[str] = []
    for kind, event in sorted(old.items()):
        name = event["title"]
        if kind not in new:
            found.append(f"kind {kind} ({name}) is gone: an old log could not be read")
        elif new[kind]["title"] != name:
            now = new[kind]["title"]
            found.append(f"kind {kind} ({name}) now means {now}: an old log could not be read")
        else:
            changes = _field_breaks(event, new[kind], frozen, current)
            found += [
                f"kind {kind} ({name}), {change}: an old log could not be read"
                for change in changes
            ]
    return found


def _by_kind(schema: Schema) -> dict[int, Schema]:
    return {d["x-kind"]: d for d in schema["$defs"].values() if "x-kind" in d}


def _field_breaks(old: Schema, new: Schema, frozen: Schema, current: Schema) -> Iterator[str]:
    names, now = old["x-fields"], new["x-fields"]
    for at, name in enumerate(names):
        if name not in now:
            yield f"field {name!r} is removed"
        elif now[at : at + 1] != [name]:
            yield f"field {name!r} is no longer at place {at + 1}"
        else:
            before, after = old["prefixItems"][at + 1], new["prefixItems"][at + 1]
            yield from _type_breaks(name, before, after, frozen, current)
            # An old log may lack what had a default: it must mean the same still.
            if "default" in before and before["default"] != after.get("default", ...):
                yield f"field {name!r} had default {before['default']!r}"
    added = [name for name in now if name not in names]
    for name in added:
        if now.index(name) + 1 < new["minItems"]:
            yield f"new field {name!r} has no default"
        if now.index(name) < len(names):
            yield f"new field {name!r} is not last"


def _type_breaks(
    field: str, old: Schema, new: Schema, frozen: Schema, current: Schema
) -> Iterator[str]:
    before, after = _shape(old, frozen), _shape(new, current)
    lost = list(_lost_names(before, after))
    yield from (f"field {field!r} could be {name}, which is gone or renumbered" for name in lost)
    if not lost and not _fits(before, after):
        yield f"field {field!r} is retyped from {before} to {after}"


def _lost_names(before: Any, after: Any) -> Iterator[str]:
    """Enum members of `before` that `after` has not, or under another number."""
    if isinstance(before, list) and isinstance(after, list):
        for one, other in zip(before, after, strict=False):
            yield from _lost_names(one, other)
    elif isinstance(before, dict) and isinstance(after, dict):
        if "x-names" in before and "x-names" in after:
            now = after["x-names"]
            yield from (f"{n} = {v}" for n, v in before["x-names"].items() if now.get(n) != v)
        else:
            for key in before.keys() & after.keys():
                yield from _lost_names(before[key], after[key])


def _fits(before: Any, after: Any) -> bool:
    """Whether what had type `before` is read as `after`; enums may have gained members."""
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_fits, before, after))
    if isinstance(before, dict) and isinstance(after, dict):
        if "x-names" in before and "x-names" in after:
            return not list(_lost_names(before, after))
        return before.keys() == after.keys() and all(_fits(before[k], after[k]) for k in before)
    return bool(before == after)


def _shape(item: Schema, schema: Schema) -> Schema:
    """The type alone: references followed, descriptions, titles and defaults left out."""
    if "$ref" in item:
        return _shape(schema["$defs"][item["$ref"].rpartition("/")[2]], schema)
    if "x-names" in item:
        return {"x-names": item["x-names"]}
    shape: Schema = {}
    for key, value in item.items():
        if key in ("title", "description", "default", "x-fields"):
            continue
        if isinstance(value, dict):
            shape[key] = _shape(value, schema)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            shape[key] = [_shape(part, schema) for part in value]
        else:
            shape[key] = value
    return shape
