"""`hisparse bench`: each verb prints the documented cases, with finite figures."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from cli_case import call

KEYS = {"name", "median", "p99", "unit", "runs", "spread", "ratios"}
NUMBERS = ("median", "p99", "spread")
TINY = {
    "log": ("--requests", 1, "--tokens", 128, "--steps", 4),
    "coordinator": ("--requests", 2, "--tokens", 128, "--gpu-blocks", 500, "--steps", 4),
}
WORLDS = ("log ring", "log off", "log disk", "lockstep", "tenfold blocks", "tenfold both")
NAMES = {
    "log": [
        "append, log off",
        "append, log ring",
        "append, log disk",
        "fold",
        "fold, per page transition",
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
}
RATIOS = {"log": "append", "coordinator": ""}  # the cases that have ratios, to that with log ring


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
        assert case["runs"] == 1 and case["unit"].startswith("us/")
        # JSON has no infinity: it is written as null
        figures = [case[name] for name in NUMBERS]
        assert all(isinstance(x, float) and math.isfinite(x) and x >= 0 for x in figures)
        assert 0 < case["median"] <= case["p99"]


def test_ratios_are_of_medians_of_the_same_run(bench) -> None:
    verb, cases = bench
    wall, *cpu = (case["median"] for case in cases if "log ring" in case["name"])
    for case in cases:
        median = cpu[0] if case["name"].startswith("its CPU time") else wall
        rated = case["name"].startswith(RATIOS[verb])
        wanted = {"ring": case["median"] / median} if rated else {}
        assert case["ratios"] == pytest.approx(wanted)


def test_without_json_it_is_a_line_a_case() -> None:
    result = call("bench", "log", "--runs", 1, *TINY["log"])
    lines = result.stdout.splitlines()
    assert len(lines) == len(NAMES["log"])
    for line, name in zip(lines, NAMES["log"], strict=True):
        assert line.startswith(name) and "us/" in line and "1 runs" in line
