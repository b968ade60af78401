"""BatchInvariant: a row's bits are a function of the row, whatever stands beside and behind it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from hisparse.errors import UsageError
from hisparse.integrations.transformers.batch_invariant import BatchInvariant


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def invariant(call, *args, **extra):
    with torch.no_grad(), BatchInvariant():
        return call(*args, **extra)


@pytest.mark.parametrize("rows", [1, 2, 31, 100])
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(rows):
    x, weight, bias = random(256, 64), random(96, 64), random(96)
    for given in (None, bias):
        whole = invariant(torch.nn.functional.linear, x, weight, given)
        part = invariant(torch.nn.functional.linear, x[7 : 7 + rows].clone(), weight, given)
        assert torch.equal(part, whole[7 : 7 + rows])
        assert torch.allclose(whole, torch.nn.functional.linear(x, weight, given), atol=1e-4)


@pytest.mark.parametrize("columns", [64, 70, 300])
def test_a_score_has_the_same_bits_however_long_the_context(columns):
    query, keys = random(5, 4, 32), random(5, 320, 32)
    whole = invariant(torch.bmm, query, keys.transpose(1, 2))
    part = invariant(torch.bmm, query[1:3], keys[1:3, :columns].transpose(1, 2))
    assert torch.equal(part, whole[1:3, :, :columns])
    assert torch.allclose(whole, torch.bmm(query, keys.transpose(1, 2)), atol=1e-4)


def test_a_matrix_and_a_vector_each():
    weights, vectors = random(40, 64, 32), random(40, 32, 1)
    whole = invariant(torch.bmm, weights, vectors)
    assert torch.equal(invariant(torch.bmm, weights[3:4], vectors[3:4]), whole[3:4])
    assert torch.allclose(whole, torch.bmm(weights, vectors), atol=1e-4)


@pytest.mark.parametrize("columns", [6, 7, 200])
def test_of_equal_values_the_earlier_are_chosen(columns):
    values = torch.full((3, columns), -torch.inf)
    values[:, 1:6] = torch.tensor([-1.0, 0.0, 2.0, -0.0, 0.0])
    told, at = invariant(torch.topk, values, 3)
    assert at.tolist() == [[3, 2, 4]] * 3 and told.tolist() == [[2.0, 0.0, 0.0]] * 3


def test_what_is_not_known_to_be_invariant_is_refused():
    with pytest.raises(UsageError, match=r"mv.*not batch-invariant"):
        invariant(torch.mv, random(3, 4), random(4))
    with pytest.raises(UsageError, match="only the largest float32 along the last dimension"):
        invariant(torch.topk, random(3, 4).double(), 2)
