"""IdQueue: a FIFO of distinct ids, against a plain list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.fsm.idqueue import IdQueue

SIZE = 7
words = st.lists(
    st.tuples(st.sampled_from(["push", "remove", "peek"]), st.permutations(range(SIZE))),
    max_size=60,
)


def array(ids):
    return np.array(ids, dtype=np.int64)


@settings(max_examples=200, deadline=None)
@given(words)
def test_it_does_what_a_list_does(word):
    queue, model = IdQueue(SIZE), []
    for verb, order in word:
        ids = order[: order[0] + 1]
        if verb == "push":
            ids = [i for i in ids if i not in model]
            queue.push(array(ids))
            model += ids
        elif verb == "remove":
            ids = [i for i in ids if i in model]
            queue.remove(array(ids))
            model = [i for i in model if i not in ids]
        else:
            assert queue.peek(len(ids)).tolist() == model[: len(ids)]
        assert queue.ordered().tolist() == model
        assert len(queue) == queue.count == len(model)
        assert [i in queue for i in range(SIZE)] == [i in model for i in range(SIZE)]
        assert np.flatnonzero(queue.members()).tolist() == sorted(model)


def test_it_starts_with_the_ids_it_is_given_in_their_order():
    assert IdQueue(SIZE, array([5, 2, 6])).ordered().tolist() == [5, 2, 6]


@pytest.mark.parametrize("ids", [[3], [1, 1]])
def test_a_double_push_is_refused(ids):
    queue = IdQueue(SIZE, array([3]))
    with pytest.raises(AssertionError, match="twice"):
        queue.push(array(ids))


@pytest.mark.parametrize("ids", [[4], [3, 3]])
def test_a_double_removal_is_refused(ids):
    queue = IdQueue(SIZE, array([3]))
    with pytest.raises(AssertionError):
        queue.remove(array(ids))
        queue.remove(array([]))
        assert queue.count == len(queue.ordered())
