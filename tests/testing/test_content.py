"""The content oracle keeps what it knows, and says the same as one that forgets."""

from __future__ import annotations

import random

import numpy as np

from hisparse.testing.content import Chain, row_bytes


def test_a_chain_that_was_edited_is_one_that_was_made_anew():
    rng, kept, tokens = random.Random(1), Chain(), []
    for _ in range(200):
        edit = rng.randrange(4)
        if edit == 0 and tokens:
            del tokens[rng.randrange(len(tokens)) :]
        elif edit == 1 and tokens:
            tokens[rng.randrange(len(tokens))] = rng.randrange(96)
        tokens += [rng.randrange(96) for _ in range(rng.randrange(4))]
        tags, cache = Chain().tags(tokens), rng.randrange(3)
        assert (kept.tags(tokens) == tags).all() and len(tags) == len(tokens)
        assert (kept.rows(cache, 20) == row_bytes(tags, cache, 20)).all()


def test_rows_differ_by_token_position_and_cache():
    tags = Chain().tags([5, 5, 5, 6])
    rows = [row_bytes(tags, cache, 16) for cache in (0, 1)]
    assert len({row.tobytes() for row in np.concatenate(rows)}) == 8
