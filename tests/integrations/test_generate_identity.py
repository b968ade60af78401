"""`generate` over tiers that are too small gives the tokens of stock eager, and the very logits of
a store in which everything stays. Run with the newest transformers, and by
test_transformers_versions.py with the oldest."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from generate_rig import config, early_end, generate, live, over, prompts, tiers
from resident_store import ResidentStore

from hisparse.integrations.transformers import HiSparseCache
from hisparse.integrations.transformers.tiny import MODEL_TYPES, tiny_model

KINDS = [(kind, torch.float32) for kind in MODEL_TYPES]
KINDS += [("deepseek_v32", torch.bfloat16), ("hy_v4", torch.bfloat16)]


@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=lambda value: str(value).split(".")[-1])
def test_a_padded_batch_of_which_one_line_ends_early(kind, dtype):
    model, (ids, mask) = tiny_model(kind, seed=1, dtype=dtype), prompts()
    want, of_eager = generate(model, None, ids, mask, eos_token_id=-1)
    eos = early_end(want)
    with tiers(model) as backend:
        tokens, logits = over(model, backend, ids, mask, eos_token_id=eos)
        counts, moved = backend.coordinator.metrics.counts, backend.worker.statistics()
        kinds = [type(event).__name__ for _, event in backend.coordinator.log.read(1)]
    decided = live(tokens, eos)
    assert torch.equal(tokens, want.masked_fill(~decided.T, 0)) and not decided.all()
    assert torch.allclose(logits[decided], of_eager[decided], atol=0.05)

    assert counts["spills"] > 20 and counts["requests_finished"] == 3
    fed = int(decided.sum()) - 2  # the line that ended feeds its EOS too, the others not their last
    assert counts["rows_computed"] == int(mask.sum()) + fed
    assert "StepPlanned" in kinds[kinds.index("RequestFinished") :]  # its memory went back
    assert moved["host_rows"] > 50 and moved["hits"] > 10 and moved["resident"] > 500
    oracle, of_oracle = over(model, ResidentStore(config(model)), ids, mask, eos_token_id=eos)
    assert torch.equal(tokens, oracle) and torch.equal(logits, of_oracle)


def test_everything_resident_in_a_large_pool_gives_the_same_bits():
    model, (ids, mask) = tiny_model("glm_moe_dsa", seed=1), prompts()
    with tiers(model) as backend:
        tokens, logits = over(model, backend, ids, mask)
        assert backend.worker.statistics()["host_rows"] > 50
    with tiers(model, gpu_blocks=400) as backend:
        resident, of_resident = over(model, backend, ids, mask)
        assert backend.worker.statistics()["host_rows"] == 0
    assert torch.equal(tokens, resident) and torch.equal(logits, of_resident)


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_chunked_prefill_and_a_second_turn(kind):
    """Chunks of 16: the line with 33 columns of padding begins in the third."""
    model, (ids, mask) = tiny_model(kind, seed=2), prompts(seed=5)
    more = prompts(seed=6, width=9)[0].clamp(min=2)

    def two_turns(cache):
        first, of_first = generate(model, cache, ids, mask, 16, prefill_chunk_size=16, **never)
        turn = torch.cat([ids, first, more], 1)
        held = torch.cat([mask, torch.ones(3, turn.shape[1] - ids.shape[1], dtype=int)], 1)
        if cache is None:  # stock: one cache over both turns is what it is compared with
            return first, generate(model, None, turn, held, 16, **never)[0], None
        second, of_second = generate(model, cache, turn, held, 16, **never)
        return first, second, torch.cat([of_first, of_second])

    never = {"eos_token_id": -1, "pad_token_id": 0}
    want = two_turns(None)
    with tiers(model, step_rows=48) as backend, HiSparseCache(model, backend) as cache:
        got = two_turns(cache)
        assert backend.coordinator.metrics.counts["spills"] > 20
        assert backend.worker.statistics()["host_rows"] > 30
    with HiSparseCache(model, ResidentStore(config(model))) as cache:
        oracle = two_turns(cache)
    assert all(torch.equal(*pair) for pair in zip(got[:2], want[:2], strict=True))
    assert all(torch.equal(*pair) for pair in zip(got, oracle, strict=True))
