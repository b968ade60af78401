"""`hisparse bench`: each verb prints the documented cases, with finite figures."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from cli_case import call

from hisparse.bench import log_append, log_shapes
from hisparse.bench.log_check import page_transitions
from hisparse.cli.opening import open_history
from hisparse.fsm.events import AcknowledgementsTaken, PagesSpilled

KEYS = {"name", "median", "p99", "unit", "runs", "spread", "ratios"}
NUMBERS = ("median", "p99", "spread")
TINY = {
    "log": ("--requests", 1, "--tokens", 128, "--steps", 4, "--checked", 200, "--sought", 12_000),
    "coordinator": ("--requests", 2, "--tokens", 128, "--gpu-blocks", 500, "--steps", 4),
    "backend": ("--requests", 2, "--tokens", 1024, "--top-k", 16, "--steps", 2),
}
BY_LOG = ("log ring", "log off", "log disk")
WORLDS = (*BY_LOG, "lockstep", "HiSparse off", "tenfold blocks", "tenfold both")
EVENTS = ("events of 64 pages", "single events")
OTHERS = ("msgspec file", "eventsourcing popo", "eventsourcing sqlite")
WRITERS = ("log off", "log ring", "log disk", "log disk, fsync", *OTHERS)
MEMORY = ("kept", "at most")
SHAPES = ("wide", "narrow", "pressure", "ranks", "streamed")
NAMES = {
    "log": [
        *(f"append, {what}, {by}" for what in EVENTS for by in WRITERS),
        "fold",
        "fold, per page transition",
        "its CPU time, fold, per page transition",
        "state, columns and queues",
        "state, with the tables that name blocks",
        *(f"{what}, {shape}" for shape in SHAPES for what in ("check", "its CPU time")),
        *(
            f"{what}seek{how}, 12000 events"
            for how in ("", ", compressed")
            for what in ("", "its CPU time, ")
        ),
    ],
    "coordinator": [
        f"{name}, 2 x 128 tokens"
        for name in (
            *(f"coordinator step, {world}" for world in WORLDS),
            *(f"its CPU time, {world}" for world in WORLDS),
            "part: acknowledgements",
            "part: planning",
            "part: command",
            "part: acceptance",
            "part: allocation",
            "part: hashing",
        )
    ],
    "backend": [
        *("step", "plan_step", "begin_step", "write_index", "write", "resolve", "end_step"),
        *(f"resolve, {who}: memory {x}" for who in ("leader", "follower") for x in MEMORY),
    ],
}
UNITS = {
    "us/transition",
    "us/event",
    "us/step",
    "B/block",
    "s/M transitions",
    "ms/seek",
    "us",
    "KiB",
}


@pytest.fixture(scope="module", params=list(TINY))
def bench(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    """A verb and the cases that it printed."""
    result = call("bench", request.param, "--runs", 1, *TINY[request.param], "--json")
    assert result.exit_code == 0 and result.stderr == ""
    report = json.loads(result.stdout)
    assert set(report) == {"cases"}
    return request.param, report["cases"]


def test_the_cases_are_named(bench) -> None:
    verb, cases = bench
    assert [case["name"] for case in cases] == NAMES[verb]


def test_a_case_has_the_documented_keys_and_finite_figures(bench) -> None:
    for case in bench[1]:
        assert set(case) == KEYS
        assert case["runs"] == 1 and case["unit"] in UNITS
        # JSON has no infinity: it is written as null
        figures = [case[name] for name in NUMBERS]
        assert all(isinstance(x, float) and math.isfinite(x) and x >= 0 for x in figures)
        assert 0 < case["median"] <= case["p99"]


def test_ratios_of_the_coordinator_are_to_the_log_in_memory(bench) -> None:
    verb, cases = bench
    if verb != "coordinator":
        return
    wall, *cpu = (case["median"] for case in cases if "log ring" in case["name"])
    for case in cases:
        median = cpu[0] if case["name"].startswith("its CPU time") else wall
        assert case["ratios"] == pytest.approx({"ring": case["median"] / median})


def test_ratios_of_appending_are_to_the_others_with_the_same_events(bench) -> None:
    verb, cases = bench
    if verb != "log":
        return
    medians = {case["name"]: case["median"] for case in cases}
    for case in cases:
        events = next((what for what in EVENTS if what in case["name"]), None)
        bases = {} if events is None else {by: f"append, {events}, {by}" for by in OTHERS}
        assert case["ratios"] == pytest.approx(
            {
                by: case["median"] / medians[name]
                for by, name in bases.items()
                if name != case["name"]
            }
        )


def test_without_the_library_its_cases_are_left_out_by_name(monkeypatch) -> None:
    monkeypatch.setattr(log_append, "find_spec", lambda name: None)
    result = call("bench", "log", "--runs", 1, *TINY["log"])
    assert result.exit_code == 0 and "eventsourcing" not in result.stdout
    assert "left out" in result.stderr and "pip install 'hisparse[bench]'" in result.stderr


def test_all_writers_are_given_the_same_content() -> None:
    """The library's JSON holds every field of our event, whose own bytes decode to it."""
    (batch,) = log_append.batches(3, 1)
    writer = log_append._eventsourcing(None)
    for event, theirs in zip(batch, writer.ready(batch), strict=True):
        for name in event.__struct_fields__:
            value, found = getattr(event, name), getattr(theirs, name)
            plain = [v.hex() for v in value] if name == "page_hashes" else value
            assert found == (list(plain) if isinstance(plain, tuple) else plain)


def test_a_logs_shape_is_what_it_says(tmp_path) -> None:
    for shape in ("narrow", "pressure", "ranks"):
        log_shapes.SHAPES[shape](tmp_path / shape, 600)
    told = {s: [e for _, e in open_history(tmp_path / s)] for s in ("narrow", "pressure", "ranks")}
    moved = {s: sum(map(page_transitions, e)) / len(e) for s, e in told.items()}
    assert moved["pressure"] < 1.2 < 2 < moved["narrow"] < moved["ranks"]
    assert any(isinstance(e, PagesSpilled) for e in told["pressure"])
    assert {e.rank for e in told["ranks"] if isinstance(e, AcknowledgementsTaken)} == {*range(8)}


def test_without_json_it_is_a_line_a_case() -> None:
    result = call("bench", "log", "--runs", 1, *TINY["log"])
    lines = result.stdout.splitlines()
    assert len(lines) == len(NAMES["log"])
    for line, name in zip(lines, NAMES["log"], strict=True):
        assert line.startswith(name) and "1 runs" in line
