"""The oracle: decoding many equals decoding one, and the dense cache is what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hisparse.device.rows import StepRows
from hisparse.engine.builtin import EOS, BuiltinModel
from hisparse.engine.reference import DenseCache, reference_decode, reference_decode_many
from hisparse.errors import UsageError


@pytest.fixture(scope="module")
def model() -> BuiltinModel:
    return BuiltinModel(seed=2, top_k=16, max_model_len=1024)


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, EOS, size=length).astype(np.int64)


def test_many_equals_one_by_one(model: BuiltinModel) -> None:
    prompts = [prompt(seed, length) for seed, length in enumerate([1, 16, 17, 64, 100, 33])]
    max_news = [12, 1, 30, 7, 20, 2]
    seen: list[tuple[int, int]] = []
    many = reference_decode_many(
        model, prompts, max_news, chunk=32, batch=4, progress=lambda *at: seen.append(at)
    )
    assert seen == [(done, 6) for done in range(1, 7)]
    for ids, max_new, got in zip(prompts, max_news, many, strict=True):
        want = reference_decode(model, ids, max_new, chunk=13)
        assert got.tokens == want.tokens
        assert np.array_equal(got.logits, want.logits)
        assert np.array_equal(got.rows, want.rows)


def test_result_is_greedy_and_complete(model: BuiltinModel) -> None:
    ids = prompt(3, 50)
    result = reference_decode(model, ids, 25, chunk=64)
    assert result.logits.shape == (len(result.tokens), model.vocab_size)
    assert result.logits.dtype == np.float32
    assert model.choose(torch.from_numpy(result.logits)).tolist() == result.tokens
    assert result.rows.shape == (6, 50 + len(result.tokens) - 1, model.layout.row_bytes)
    assert result.rows.any(axis=-1).all()  # every position of every layer was written


def test_eos_ends_a_request_and_is_kept() -> None:
    class Ends(BuiltinModel):
        def choose(self, logits: torch.Tensor) -> torch.Tensor:
            chosen = super().choose(logits)
            self.calls += 1
            return torch.full_like(chosen, self.eos) if self.calls == 4 else chosen

        calls = 0

    result = reference_decode(Ends(seed=2, top_k=4, max_model_len=64), prompt(0, 5), 20, chunk=8)
    assert len(result.tokens) == 4 and result.tokens[-1] == EOS
    assert result.rows.shape[1] == 5 + 4 - 1


def test_outputs_are_lively_and_end_rarely() -> None:
    model = BuiltinModel(seed=0, top_k=16, max_model_len=1024)
    prompts = [prompt(seed, 30 + 5 * seed) for seed in range(12)]
    results = reference_decode_many(model, prompts, [64] * 12, chunk=64, keep_rows=False)
    assert sum(len(result.tokens) == 64 for result in results) >= 10
    assert all(len(set(r.tokens)) >= len(r.tokens) / 4 for r in results)
    assert len({tuple(result.tokens) for result in results}) == 12
    assert all(result.rows.shape[1] == 0 for result in results)


def test_dense_cache_keeps_rows_apart_and_pads_with_zeros(model: BuiltinModel) -> None:
    layout = model.layout
    cache = DenseCache(layout)
    data = np.random.RandomState(0).randint(1, 256, size=(600, layout.row_bytes), dtype=np.uint8)
    for start in range(0, 300, 100):  # grows past its first capacity
        at = np.arange(start, start + 100, dtype=np.int64)
        step = StepRows(np.repeat(np.array([5, 9], dtype=np.int32), 100), np.tile(at, 2))
        cache.begin(step)
        both = torch.from_numpy(np.concatenate([data[at], data[300 + at]]))
        cache.write(1, both)
        cache.write_index(1, both[:, : layout.index_row_bytes])
    assert np.array_equal(cache.rows(5, 300)[1], data[:300])
    assert np.array_equal(cache.index_keys(1, 9, 250), data[300:550, : layout.index_row_bytes])
    cache.begin(StepRows(np.array([9, 5], dtype=np.int32), np.array([299, 299])))
    with pytest.raises(UsageError, match="layer 2 is a follower"):
        cache.gather(2, None)
    selection = torch.tensor([[3, 299, -1], [0, -1, -1]], dtype=torch.int32)
    for got in (cache.gather(1, selection).numpy(), cache.gather(1, None).numpy()):
        assert np.array_equal(got[0, :2], data[[303, 599]]) and np.array_equal(got[1, 0], data[0])
        assert not got[0, 2].any() and not got[1, 1:].any()
    cache.free(5)
    cache.begin(StepRows(np.array([5], dtype=np.int32), np.array([0])))
    assert not cache.rows(5, 10).any()


@pytest.mark.parametrize(
    ("prompts", "max_news", "options", "match"),
    [
        ([np.array([1])], [], {}, "1 prompts and 0 max_news"),
        ([np.array([], dtype=np.int64)], [1], {}, "request 0 has 0 prompt tokens"),
        ([np.array([1])], [0], {}, "max_new=0"),
        ([np.array([1])], [1], {"chunk": 0}, "chunk=0"),
        ([np.array([1])], [1], {"batch": 0}, "batch=0"),
    ],
)
def test_refuses_calls_that_mean_nothing(
    model: BuiltinModel, prompts: list, max_news: list, options: dict, match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        reference_decode_many(model, prompts, max_news, **{"chunk": 8, **options})


def test_no_requests_give_no_results(model: BuiltinModel) -> None:
    assert reference_decode_many(model, [], [], chunk=8) == []
