"""The built-in model: bit equality under any batching, the top-k rule, and that rows matter."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from hisparse.device.rows import StepRows
from hisparse.engine import builtin_indexer
from hisparse.engine.builtin import EOS, VOCAB, BuiltinModel
from hisparse.engine.reference import DenseCache
from hisparse.errors import ConfigError, UsageError

TOP_K = 16


@pytest.fixture(scope="module")
def model() -> BuiltinModel:
    return BuiltinModel(seed=11, top_k=TOP_K, max_model_len=1024)


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, EOS, size=length).astype(np.int64)


def step_of(*parts: tuple[int, int, int]) -> StepRows:
    """Tokens [start, end) of request `row`, for each (row, start, end)."""
    return StepRows(
        np.concatenate([np.full(b - a, row, dtype=np.int32) for row, a, b in parts]),
        np.concatenate([np.arange(a, b, dtype=np.int64) for _, a, b in parts]),
    )


class Recorder(DenseCache):
    """A dense cache that remembers every selection."""

    def __init__(self, model: BuiltinModel) -> None:
        super().__init__(model.layout)
        self.selections: list[tuple[int, np.ndarray]] = []

    def gather(self, layer: int, top_k: torch.Tensor | None) -> torch.Tensor:
        if top_k is not None:
            self.selections.append((layer, top_k.numpy().copy()))
        return super().gather(layer, top_k)


def run(model: BuiltinModel, cache: DenseCache, tokens: np.ndarray, step: StepRows) -> np.ndarray:
    cache.begin(step)
    return model.forward(tokens, step, cache).numpy()


def choose(model: BuiltinModel, logits: np.ndarray) -> np.ndarray:
    return model.choose(torch.from_numpy(logits)).numpy()


def prefill(model: BuiltinModel, tokens: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of every token, and the cached rows, of a request alone."""
    cache = DenseCache(model.layout)
    logits = [
        run(model, cache, tokens[a : a + chunk], step_of((0, a, min(a + chunk, len(tokens)))))
        for a in range(0, len(tokens), chunk)
    ]
    return np.concatenate(logits), cache.rows(0, len(tokens))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunk_size_changes_no_bit(model: BuiltinModel, chunk: int) -> None:
    tokens = prompt(0, 150)
    whole, whole_rows = prefill(model, tokens, 150)
    logits, rows = prefill(model, tokens, chunk)
    assert np.array_equal(logits, whole)
    assert np.array_equal(rows, whole_rows)


def test_bits_are_the_same_on_every_machine(model: BuiltinModel) -> None:
    logits, rows = prefill(model, prompt(13, 100), 100)
    assert zlib.crc32(logits.astype("<f4").tobytes()) == 3665645439
    assert zlib.crc32(rows.tobytes()) == 3078546342


def test_company_and_order_change_no_bit(model: BuiltinModel) -> None:
    prompts = {row: prompt(row, 40 + 31 * row) for row in range(5)}
    alone = {row: prefill(model, tokens, 1000)[0] for row, tokens in prompts.items()}
    cache = DenseCache(model.layout)
    order = [3, 0, 4, 1, 2]
    fed = dict.fromkeys(order, 0)
    while order:
        parts = [(row, fed[row], min(fed[row] + 9 + 8 * row, len(prompts[row]))) for row in order]
        logits = run(
            model,
            cache,
            np.concatenate([prompts[row][a:b] for row, a, b in parts]),
            step_of(*parts),
        )
        at = 0
        for row, a, b in parts:
            assert np.array_equal(logits[at : at + b - a], alone[row][a:b])
            at, fed[row] = at + b - a, b
        order = [row for row in reversed(order) if fed[row] < len(prompts[row])]


def test_decode_equals_prefill_again(model: BuiltinModel) -> None:
    tokens = prompt(5, 90)
    cache = DenseCache(model.layout)
    logits = [run(model, cache, tokens, step_of((0, 0, 90)))[-1:]]
    for position in range(90, 120):
        token = choose(model, logits[-1])
        tokens = np.concatenate([tokens, token])
        logits.append(run(model, cache, token, step_of((0, position, position + 1))))
    again, rows = prefill(model, tokens, 33)
    assert np.array_equal(np.concatenate(logits), again[89:])
    assert np.array_equal(rows, cache.rows(0, 120))


def test_thread_count_changes_no_bit(model: BuiltinModel) -> None:
    tokens, found, threads = prompt(6, 130), {}, torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.get_num_threads() == count
            found[count] = prefill(model, tokens, 130)
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(found[1], found[2], strict=True):  # logits, cached rows
        assert one.tobytes() == two.tobytes()


def test_blocks_of_a_selection_change_no_bit(
    model: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(6, 130)
    expected, _ = prefill(model, tokens, 130)
    monkeypatch.setattr(builtin_indexer, "SELECT_ELEMENTS", 4 * 130 * 3)  # three tokens a block
    assert np.array_equal(prefill(model, tokens, 130)[0], expected)


def test_logits_are_integers_of_one_seed(model: BuiltinModel) -> None:
    tokens = prompt(7, 60)
    logits, rows = prefill(model, tokens, 60)
    assert logits.dtype == np.float32 and logits.shape == (60, VOCAB)
    assert np.array_equal(logits, np.round(logits)) and np.abs(logits).max() < 2**24
    assert rows.dtype == np.uint8 and rows.shape == (6, 60, model.layout.row_bytes)
    twin = BuiltinModel(seed=11, top_k=TOP_K, max_model_len=1024)
    other = BuiltinModel(seed=12, top_k=TOP_K, max_model_len=1024)
    assert np.array_equal(prefill(twin, tokens, 60)[0], logits)
    assert not np.array_equal(prefill(other, tokens, 60)[0], logits)


def test_selected_rows_matter_and_others_do_not(model: BuiltinModel) -> None:
    tokens, last = prompt(8, 200), np.array([17])
    step = step_of((0, 200, 201))

    def decode(layer: int = -1, position: int = 0) -> tuple[np.ndarray, Recorder]:
        cache = Recorder(model)
        run(model, cache, tokens, step_of((0, 0, 200)))
        cache.selections.clear()
        if layer >= 0:
            cache._kv[0][layer, position] ^= 0x15
        return run(model, cache, last, step)[0], cache

    expected, cache = decode()
    for (leader, selected), layers in zip(cache.selections, model.layout.index_groups, strict=True):
        assert leader == layers[0]
        chosen = [p for p in selected[0].tolist() if p != 200]
        ignored = min(set(range(200)) - set(chosen))
        for layer in layers:
            changed = [not np.array_equal(decode(layer, p)[0], expected) for p in chosen]
            assert sum(changed) >= len(changed) / 2  # a row of small weight may round away
            assert np.array_equal(decode(layer, ignored)[0], expected)


def test_next_token_follows_the_context(model: BuiltinModel) -> None:
    following = set()
    for seed in range(20):
        tokens = prompt(seed, 80)
        tokens[-1] = 5
        following.add(int(choose(model, prefill(model, tokens, 80)[0][-1:])[0]))
    assert len(following) >= 10


def test_index_rows_cost_at_most_a_twelfth(model: BuiltinModel) -> None:
    layout = model.layout
    assert layout.index_groups == ((0, 1, 2), (3, 4, 5)) and layout.leaders == (0, 3)
    index = len(layout.index_groups) * layout.index_row_bytes
    assert index * 12 <= layout.layers * layout.row_bytes
    assert (layout.row_bytes, layout.index_row_bytes) == (128, builtin_indexer.INDEX_WIDTH)


def test_selection_is_sorted_causal_and_padded(model: BuiltinModel) -> None:
    cache = Recorder(model)
    run(model, cache, prompt(9, 120), step_of((4, 0, 50), (2, 0, 70)))
    assert [layer for layer, _ in cache.selections] == [0, 3]
    for _, selection in cache.selections:
        assert selection.dtype == np.int32 and selection.shape == (120, TOP_K)
        for position, chosen in zip([*range(50), *range(70)], selection.tolist(), strict=True):
            real = [p for p in chosen if p >= 0]
            assert len(real) == min(TOP_K, position + 1)
            assert chosen == sorted(set(real)) + [-1] * (TOP_K - len(real))
            assert real[-1] <= position


def test_top_k_ties_prefer_the_earlier_position() -> None:
    model = BuiltinModel(seed=0, top_k=8, max_model_len=64)
    random = np.random.RandomState(1)
    for total, m in [(5, 3), (8, 8), (9, 9), (40, 6), (64, 1)]:
        q = random.randint(-1, 2, size=(4, m, builtin_indexer.INDEX_WIDTH))
        keys = random.randint(-1, 2, size=(total, builtin_indexer.INDEX_WIDTH))
        keys[:, 3:] = 0  # few distinct scores: many ties
        out = torch.full((m, 8), builtin_indexer.MAX_POSITIONS)
        model._selector.best(torch.tensor(q).float(), torch.tensor(keys).float(), out)
        score = np.maximum(np.einsum("hmd,td->hmt", q, keys), 0).sum(0)
        for i in range(m):
            own = total - m + i
            ranked = sorted(range(own + 1), key=lambda p, i=i: (-score[i, p], p))[:8]
            assert sorted(p for p in out[i].tolist() if p < total) == sorted(ranked)


def test_choice_takes_the_lowest_id_of_a_tie(model: BuiltinModel) -> None:
    logits = np.zeros((2, VOCAB), dtype=np.float32)
    logits[0, [7, 200]] = 3
    assert choose(model, logits).tolist() == [7, 0]
    assert choose(model, logits).dtype == np.int64


@pytest.mark.parametrize(
    "arguments",
    [{"top_k": 0}, {"top_k": 2049}, {"max_model_len": 0}, {"max_model_len": 1 << 21}, {"seed": -1}],
)
def test_refuses_what_would_not_be_exact(arguments: dict[str, int]) -> None:
    good = {"seed": 0, "top_k": 4, "max_model_len": 64}
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        BuiltinModel(**{**good, **arguments})


@pytest.mark.parametrize(
    ("tokens", "rows", "positions"),
    [
        ([1, 2], [0, 0], [0]),
        ([1, VOCAB], [0, 0], [0, 1]),
        ([1, 2], [0, 0], [0, 2]),
        ([1, 2, 3], [0, 1, 0], [0, 0, 1]),
        ([1], [0], [1024]),
        ([1], [0], [-1]),
    ],
)
def test_refuses_a_step_before_any_write(
    model: BuiltinModel, tokens: list[int], rows: list[int], positions: list[int]
) -> None:
    step = StepRows(np.array(rows, dtype=np.int32), np.array(positions, dtype=np.int64))
    with pytest.raises(UsageError):
        model.forward(np.array(tokens), step, DenseCache(model.layout))


def test_an_empty_step_has_no_logits(model: BuiltinModel) -> None:
    empty = np.zeros(0, dtype=np.int64)
    step = StepRows(empty.astype(np.int32), empty)
    assert model.forward(empty, step, DenseCache(model.layout)).shape == (0, VOCAB)
