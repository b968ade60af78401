"""`generate` of models on a GPU, over tiers whose host pages lie in pinned memory."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from generate_rig import config, early_end, generate, live, over, prompts, tiers
from resident_store import ResidentStore

from hisparse.integrations.transformers import HiSparseCache
from hisparse.integrations.transformers.tiny import MODEL_TYPES, tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_padded_batch_of_which_one_line_ends_early(kind, dtype):
    model = tiny_model(kind, seed=1, dtype=dtype, device="cuda")
    ids, mask = prompts(device="cuda")
    want, of_eager = generate(model, None, ids, mask, eos_token_id=-1)
    eos = early_end(want)
    with tiers(model, device="cuda") as backend:
        tokens, logits = over(model, backend, ids, mask, eos_token_id=eos)
        counts, moved = backend.coordinator.metrics.counts, backend.worker.statistics()
    assert counts["spills"] > 20 and moved["host_rows"] > 50 and moved["hits"] > 10
    oracle = ResidentStore(config(model), "cuda")
    resident, of_resident = over(model, oracle, ids, mask, eos_token_id=eos)
    assert torch.equal(tokens, resident) and torch.equal(logits, of_resident)
    decided = live(tokens, eos)
    assert torch.equal(tokens, want.masked_fill(~decided.T, 0)) and not decided.all()
    assert torch.allclose(logits[decided], of_eager[decided], atol=0.1)


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_chunked_prefill_and_a_second_turn(kind):
    model = tiny_model(kind, seed=2, device="cuda")
    ids, mask = prompts(seed=5, device="cuda")
    options = {"eos_token_id": -1, "pad_token_id": 0}

    def two_turns(cache):
        first, _ = generate(model, cache, ids, mask, 16, prefill_chunk_size=16, **options)
        turn = torch.cat([ids, first, ids[:, -9:].clamp(min=2)], 1)
        held = torch.cat([mask, torch.ones_like(turn[:, ids.shape[1] :])], 1)
        return torch.cat([first, generate(model, cache, turn, held, 16, **options)[0]], 1)

    want = two_turns(None)
    with tiers(model, device="cuda", step_rows=48) as backend:
        with HiSparseCache(model, backend) as cache:
            assert torch.equal(two_turns(cache), want)
        assert backend.worker.statistics()["host_rows"] > 30
