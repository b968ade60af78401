"""Each seeded fault makes its invariant fail within 100 seeds; without one, none fails."""

from __future__ import annotations

import pytest
from mutants import MUTANTS

from hisparse.testing.calm import simulate

SEEDS = 100


@pytest.mark.parametrize("name", list(MUTANTS))
def test_fault_is_found_by_name(name):
    fault, invariants = MUTANTS[name]
    others = {}
    for seed in range(SEEDS):
        with fault():
            found = simulate(seed).violation
        if found is not None and found.invariant in invariants:
            return
        if found is not None:
            others[seed] = found
    pytest.fail(f"{name}: none of {invariants} in {SEEDS} seeds; others: {others}")


def test_without_a_fault_nothing_is_found():
    for seed in range(60):
        assert simulate(seed).violation is None


def test_a_run_is_a_function_of_its_seed():
    first, again = simulate(7), simulate(7)
    assert (first.digest, first.events, first.rows_checked) == (
        again.digest,
        again.events,
        again.rows_checked,
    )
