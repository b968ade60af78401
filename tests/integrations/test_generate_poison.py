"""With checks on, every page that was evicted is poison where it lay, in both tiers; and one row
read in such a place is another token of the model."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import numpy as np
import torch
from generate_rig import over, prompts, tiers

from hisparse.device.layout import NULL, POISON
from hisparse.integrations.transformers.tiny import tiny_model

NEW, STEP = 12, 6


def rows_where(backend, blocks, pages):
    """Layer 0 as it lies in those GPU blocks and host pages now: uint8 [rows, row bytes]."""
    backend.device.synchronize(None)
    handle = backend.worker.handles[0]
    return np.concatenate(
        [handle.resident.array[blocks], handle.runtime.host.array[pages]]
    ).reshape(-1, backend.config.layout.row_bytes)


def test_a_read_where_an_evicted_page_lay_gives_poison_and_another_token(monkeypatch):
    model, (ids, mask) = tiny_model("glm_moe_dsa", seed=1), prompts(lines=1)
    with tiers(model) as backend:
        right, _ = over(model, backend, ids, mask, NEW)
        backend.drain()
        state = backend.coordinator.state
        blocks = state.blocks.cached.ordered()
        pages = np.array(sorted(state.prefix.values()))
        assert len(blocks) > 5 and len(pages) > 5 and NULL not in {*blocks, *pages}
        assert not (rows_where(backend, blocks, pages) == POISON).all(1).any()

        assert backend.reset_prefix_cache()
        backend.begin_step(backend.plan_step({}))  # the command that tells the worker
        backend.end_step()
        stale = rows_where(backend, blocks, pages)
        assert (stale == POISON).all()

        read, passes = backend.resolve, iter(range(100))

        def resolve(layer, top_k=None):
            rows = read(layer, top_k)
            if layer == 0 and next(passes) == STEP:
                rows = rows.clone()
                rows[0, 0] = torch.from_numpy(stale[0])
            return rows

        monkeypatch.setattr(backend, "resolve", resolve)
        wrong, _ = over(model, backend, ids, mask, NEW)
    assert torch.equal(wrong[:, :STEP], right[:, :STEP]) and not torch.equal(wrong, right)
