"""Columns: the memo of tuples and arrays changes no result."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.fsm.columns import LONG, bound, ids, ints

# Few values and few lengths, so that columns come again, as equals and as the same object.
column = st.lists(st.integers(0, 2), min_size=LONG - 1, max_size=LONG + 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(column, max_size=20))
def test_tuples_and_arrays_say_what_they_were_made_of(columns):
    for values in columns:
        for given_as in (values, tuple(values), np.array(values, dtype=np.int64)):
            array = ids(given_as)
            assert array.dtype == np.int64 and array.tolist() == values
            assert ints(array) == tuple(values) == ints(np.array(values, dtype=np.int32))
            assert all(type(value) is int for value in ints(array))


def test_a_remembered_array_cannot_be_changed():
    array = ids(list(range(LONG)))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 5


def test_what_was_made_of_an_array_outlives_its_change():
    array = np.arange(LONG)
    before = ints(array)
    array[0] = 99
    assert before[0] == 0 and ints(array)[0] == 99 and ids(before)[0] == 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], 0), ([0], 1), ([3, 1, 2], 4), ([1, 1], -1), ([0, -1], -1), ([1 << 40], -1)],
)
def test_bound_is_of_distinct_values_from_0_on(values, expected):
    array = np.array(values, dtype=np.int64)
    assert bound(array) == bound(array) == expected


def test_bound_is_not_remembered_of_an_array_that_may_change():
    array = np.array([0, 1], dtype=np.int64)
    assert bound(array) == 2
    array[1] = 0
    assert bound(array) == -1
