"""Measuring: repeated runs, medians and spread, in one shape for every `hisparse bench`.

    cases: [{name, median, p99, unit, runs, spread, ratios: {baseline: value}}]
`spread` is the distance between the quartiles of the runs' medians over their median.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class Case(msgspec.Struct, frozen=True):
    """One measured figure."""

    name: str
    median: float
    p99: float
    unit: str
    runs: int
    spread: float
    ratios: dict[str, float] = {}


def summarise(
    name: str, runs: Sequence[Sequence[float]], unit: str, ratios: dict[str, float] | None = None
) -> Case:
    """A case from the samples of several runs; `ratios` are against baselines of the same runs."""
    samples = sorted(x for run in runs for x in run)
    medians = [statistics.median(run) for run in runs]
    middle = statistics.median(medians)
    quartiles = statistics.quantiles(medians, n=4) if len(medians) > 1 else [middle] * 3
    p99 = samples[min(len(samples) - 1, int(len(samples) * 0.99))]
    spread = (quartiles[2] - quartiles[0]) / middle if middle else 0.0
    return Case(name, middle, p99, unit, len(runs), spread, ratios or {})


def as_json(cases: Sequence[Case]) -> str:
    return msgspec.json.format(msgspec.json.encode({"cases": list(cases)}), indent=2).decode()


def as_table(cases: Sequence[Case]) -> str:
    """Aligned text, a line a case."""
    width = max(len(case.name) for case in cases)
    lines = []
    for case in cases:
        ratios = "  ".join(f"{value:.3g}x {name}" for name, value in case.ratios.items())
        lines.append(
            f"{case.name:<{width}}  {case.median:>10.3f} {case.unit:<14} p99 {case.p99:>10.3f}  "
            f"{case.runs} runs ±{100 * case.spread:.0f} %  {ratios}".rstrip()
        )
    return "\n".join(lines)
