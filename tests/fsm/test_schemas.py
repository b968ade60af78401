"""Schemas and the page of machines: fresh, and never such that an old log could not be read."""

from __future__ import annotations

import enum
import json
import re
import runpy
import tomllib
from pathlib import Path

import msgspec
import pytest

from hisparse.config_check import checked_config
from hisparse.fsm.diagrams import render
from hisparse.fsm.machines import MACHINES
from hisparse.fsm.schemas import SCHEMAS, as_text, events_schema, log_breaks, wire_schema

ROOT = Path(__file__).resolve().parents[2]
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))
FRESH = "run `python docs/generate.py`"

# Words that would let a worker know whose rows it moves.
FORBIDDEN = re.compile(
    r"request|token|hash|prompt|prefix|salt|logical|position|text|user|session|page_?(id|index|no)"
)
COMMAND_FIELDS = {
    "SparseKVOffloadCommand": [
        "step",
        "worker_epoch",
        "from_seq",
        "to_seq",
        "resets",
        "tables",
        "fences",
        "poison_blocks",
        "poison_hosts",
        "index_copies",
        "transfers",
        "acked",
        "index_transfers",
        "poison_suffixes",
        "memory",
        "epochs",
    ],
    "IndexTransfer": [
        "transfer",
        "epoch",
        "load",
        "block",
        "block_epoch",
        "slot",
        "suffix",
        "suffix_epoch",
    ],
    "TableUpdate": ["table", "row", "entry", "ids"],
    "IndexCopy": ["source", "source_slot", "block", "slot", "pages"],
    "SparseKVPageTransfer": [
        "transfer",
        "epoch",
        "kind",
        "block",
        "block_epoch",
        "host",
        "host_epoch",
    ],
}


# -- freshness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_checked_in_schema_is_that_of_the_code(name):
    text = (ROOT / "schemas" / name).read_text(encoding="utf-8")
    assert text == as_text(SCHEMAS[name]()), f"schemas/{name} is stale: {FRESH}"


def test_the_checked_in_page_of_machines_is_that_of_the_code():
    text = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    assert text == render(), f"docs/machines.md is stale: {FRESH}"


def test_the_checked_in_page_of_the_configuration_is_that_of_the_models():
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert text == GENERATE["configuration"](), f"docs/configuration.md is stale: {FRESH}"
    assert all(f"| `{name}` |" in text for name in ("gpu_blocks", "hot_rows", "scale", "ranks"))


def test_the_configuration_that_is_shown_is_one():
    shown, _of_a_run = re.findall(r"```toml\n(.*?)```", GENERATE["configuration"](), re.S)
    assert checked_config(tomllib.loads(shown)).schedule.max_model_len == 65536


def test_the_script_finds_nothing_stale():
    assert GENERATE["stale"]() == [] and GENERATE["breaks"]() == []


def test_every_machine_has_a_section_with_every_state_and_trigger():
    sections = render().split("\n## ")[1:]
    assert [section.partition("\n")[0] for section in sections] == [m.name for m in MACHINES]
    for machine, section in zip(MACHINES, sections, strict=True):
        assert section.count("```mermaid") == 1
        assert all(f"`{state.name}`" in section for state in machine.states)
        assert all(f"| `{trigger.name}` |" in section for trigger in machine.triggers)


def test_a_reader_learns_kind_fields_and_enum_names():
    defs = events_schema()["$defs"]
    spilled = defs["PagesSpilled"]
    assert spilled["x-kind"] == 35
    assert spilled["x-fields"][:3] == ["cause", "row", "trigger"]
    assert len(spilled["prefixItems"]) == 1 + len(spilled["x-fields"])
    assert defs["BlockTrigger"]["x-names"]["spilled"] == 6


# -- the frozen format ---------------------------------------------------------------------------


def test_the_log_that_is_checked_in_can_still_be_read():
    frozen = json.loads((ROOT / "schemas" / "events.json").read_text(encoding="utf-8"))
    assert log_breaks(frozen, events_schema()) == []


class Why(enum.IntEnum):
    asked = 0
    forced = 1


def event(name="Freed", kind=7, fields=(("cause", int), ("blocks", tuple[int, ...]), ("why", Why))):
    return msgspec.defstruct(name, fields, array_like=True, tag=kind)


def broken(*now):
    """What breaks for a log of ``Freed`` and ``Taken`` when the code declares `now`."""
    frozen = events_schema((event(), TAKEN))
    return log_breaks(frozen, events_schema(now))


CAUSE, BLOCKS, WHY = ("cause", int), ("blocks", tuple[int, ...]), ("why", Why)
TAKEN = event("Taken", 8, (CAUSE, BLOCKS))
RENUMBERED = enum.IntEnum("Why", {"forced": 0, "asked": 1})
SHORT = enum.IntEnum("Why", {"asked": 0})
LONG = enum.IntEnum("Why", {"asked": 0, "forced": 1, "late": 2})


@pytest.mark.parametrize(
    "now,says",
    [
        ((TAKEN,), "kind 7 (Freed) is gone"),
        ((event(kind=9), TAKEN), "kind 7 (Freed) is gone"),
        ((event("Taken", 7), event("Freed", 8)), "kind 7 (Freed) now means Taken"),
        ((event(fields=(CAUSE, BLOCKS)), TAKEN), "kind 7 (Freed), field 'why' is removed"),
        ((event(fields=(CAUSE, WHY, BLOCKS)), TAKEN), "field 'blocks' is no longer at place 2"),
        ((event(fields=(CAUSE, ("blocks", int), WHY)), TAKEN), "field 'blocks' is retyped"),
        (
            (event(fields=(CAUSE, BLOCKS, ("why", SHORT))), TAKEN),
            "field 'why' could be forced = 1, which is gone or renumbered",
        ),
        (
            (event(fields=(CAUSE, BLOCKS, ("why", RENUMBERED))), TAKEN),
            "field 'why' could be asked = 0, which is gone or renumbered",
        ),
        (
            (event(fields=(CAUSE, BLOCKS, WHY, ("step", int))), TAKEN),
            "new field 'step' has no default",
        ),
        (
            (event(fields=(CAUSE, ("step", int), BLOCKS, WHY)), TAKEN),
            "new field 'step' is not last",
        ),
    ],
)
def test_a_change_that_an_old_log_could_not_survive_is_named(now, says):
    found = broken(*now)
    assert any(says in one for one in found), found
    assert all(one.endswith("an old log could not be read") for one in found)


@pytest.mark.parametrize(
    "now",
    [
        (event(), TAKEN),
        (event(), TAKEN, event("Kept", 9)),
        (event(fields=(CAUSE, BLOCKS, WHY, ("step", int, 0))), TAKEN),
        (event(fields=(CAUSE, BLOCKS, ("why", LONG))), TAKEN),
    ],
    ids=["same", "new kind", "new trailing default", "new enum member"],
)
def test_a_change_that_an_old_log_survives_only_asks_for_new_schemas(now):
    assert broken(*now) == []


def test_a_change_that_an_old_log_survives_makes_the_schema_stale():
    frozen = as_text(events_schema((event(), TAKEN)))
    assert as_text(events_schema((event(), TAKEN))) == frozen
    assert as_text(events_schema((event(), TAKEN, event("Kept", 9)))) != frozen


def test_the_default_of_a_field_that_old_logs_lack_stays():
    frozen = events_schema((event(fields=(CAUSE, ("step", int, 0))),))
    now = events_schema((event(fields=(CAUSE, ("step", int, 1))),))
    assert "field 'step' had default 0" in log_breaks(frozen, now)[0]


# -- commands ------------------------------------------------------------------------------------


def command_structs():
    defs, found, todo = wire_schema()["$defs"], {}, ["SparseKVOffloadCommand"]
    while todo:
        name = todo.pop()
        if name not in found and "x-fields" in defs[name]:
            found[name] = defs[name]["x-fields"]
            todo += re.findall(r"#/\$defs/(\w+)", json.dumps(defs[name]))
    return found


def test_a_command_has_exactly_these_fields():
    assert command_structs() == COMMAND_FIELDS


def test_no_field_of_a_command_names_what_a_worker_may_not_know():
    named = [(s, field) for s, fields in command_structs().items() for field in fields]
    assert [one for one in named if FORBIDDEN.search(one[1])] == []
    assert all(FORBIDDEN.search(word) for word in ("request_id", "page_hashes", "tokens"))
