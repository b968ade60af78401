"""Models of transformers in continuous batching: the tokens of stock eager attention, and bits that
depend on a token's own context alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from hisparse.device.rows import StepRows
from hisparse.engine.reference import (
    DenseCache,
    reference_decode,
    reference_decode_many,
)
from hisparse.errors import UsageError
from hisparse.integrations.transformers.serving import ServedModel
from hisparse.integrations.transformers.tiny import tiny_model

KINDS = ("deepseek_v32", "glm_moe_dsa")
LENGTHS, NEW, CHUNKS = (5, 41, 70, 64), 8, (2, 41, 33, 15)


def prompts() -> list[np.ndarray]:
    return [np.random.RandomState(i).randint(1, 512, size=n) for i, n in enumerate(LENGTHS)]


def served(kind: str) -> ServedModel:
    return ServedModel(tiny_model(kind, top_k=16, max_model_len=128), max_model_len=128)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_stock_eager_attention(kind):
    stock = tiny_model(kind, top_k=16, max_model_len=128)
    made = reference_decode_many(served(kind), prompts(), [NEW] * len(LENGTHS), chunk=32)
    for prompt, result in zip(prompts(), made, strict=True):
        told = stock.generate(
            torch.tensor(prompt)[None],
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert told.sequences[0, len(prompt) :].tolist() == result.tokens
        # the same sums in another order
        assert np.abs(torch.cat(told.logits).numpy() - result.logits).max() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_batch_and_chunk(kind):
    model = served(kind)
    together = reference_decode_many(model, prompts(), [NEW] * len(LENGTHS), chunk=48)
    for prompt, chunk, one in zip(prompts(), CHUNKS, together, strict=True):
        alone = reference_decode(model, prompt, NEW, chunk=chunk)
        assert alone.tokens == one.tokens
        assert alone.logits.tobytes() == one.logits.tobytes()
        assert alone.rows.tobytes() == one.rows.tobytes()


def test_layers_that_share_a_selection_are_one_index_group():
    assert served("deepseek_v32").layout.index_groups == ((0,), (1,), (2,), (3,))
    assert served("glm_moe_dsa").layout.index_groups == ((0, 1), (2, 3))


def test_a_position_out_of_range_is_refused_before_anything_is_written():
    model = served("deepseek_v32")
    step = StepRows(np.array([0], dtype=np.int32), np.array([128]))
    with pytest.raises(
        UsageError, match=r"positions 128\.\.128 are outside 0\.\.max_model_len-1=127"
    ):
        model.forward(np.array([1]), step, DenseCache(model.layout))
