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
NAMES = {
    "log": [
        "append, log off",
        "append, log ring",
        "append, log disk",
        "fold",
        "fold, per page transition",
    ],
    "coordinator": [
        f"coordinator step, 2 x 128 tokens, log {mode}" for mode in ("off", "ring", "disk")
    ],
}
BASE = {"log": "ring", "coordinator": "off"}  # the case that ratios are against


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
    base = BASE[verb]
    (median,) = (case["median"] for case in cases if case["name"].endswith(f"log {base}"))
    for case in cases:
        wanted = {base: case["median"] / median} if "log" in case["name"] else {}
        assert case["ratios"] == pytest.approx(wanted)


def test_without_json_it_is_a_line_a_case() -> None:
    result = call("bench", "log", "--runs", 1, *TINY["log"])
    lines = result.stdout.splitlines()
    assert len(lines) == len(NAMES["log"])
    for line, name in zip(lines, NAMES["log"], strict=True):
        assert line.startswith(name) and "us/" in line and "1 runs" in line
