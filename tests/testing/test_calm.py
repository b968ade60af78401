"""The calm world: nothing is found in the code as it is, and a run is a function of its seed."""

from __future__ import annotations

from hisparse.testing.calm import simulate


def test_without_a_fault_nothing_is_found():
    for seed in range(20):
        assert simulate(seed).violation is None


def test_a_run_is_a_function_of_its_seed():
    first, again = simulate(7), simulate(7)
    assert (first.digest, first.events, first.rows_checked) == (
        again.digest,
        again.events,
        again.rows_checked,
    )
