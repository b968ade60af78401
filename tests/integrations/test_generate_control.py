"""Negative control: what the identity tests compare depends on every row that attention reads."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from generate_rig import over, prompts, tiers

from hisparse.integrations.transformers.tiny import MODEL_TYPES, tiny_model

STEP = 12


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_one_wrong_row_changes_the_token_of_its_step(kind, monkeypatch):
    model, (ids, mask) = tiny_model(kind, seed=1), prompts(lines=1)
    with tiers(model) as backend:
        right, _ = over(model, backend, ids, mask, 20)

    def tokens_with_wrong(selected):
        """Tokens where row `selected` of the selection of one step, in layer 0, is another's."""
        with tiers(model) as backend:
            read, passes = backend.resolve, iter(range(100))

            def resolve(layer, top_k=None):
                rows = read(layer, top_k)
                if layer == 0 and next(passes) == STEP:
                    rows = rows.clone()
                    rows[0, selected] = rows[0, selected - 1]
                return rows

            monkeypatch.setattr(backend, "resolve", resolve)
            return over(model, backend, ids, mask, 20)[0]

    changed = []
    for selected in range(model.config.index_topk):
        wrong = tokens_with_wrong(selected)
        assert torch.equal(wrong[:, :STEP], right[:, :STEP])
        changed.append(bool(wrong[0, STEP] != right[0, STEP]))
        if changed[-1]:
            return
    raise AssertionError(f"no row of the selection matters: {changed}")
