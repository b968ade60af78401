"""The built-in model's indexers: which cached rows a token attends to.

Contract: a score is an exact integer and ties prefer the earlier position, so that the selected
set is a function of the query and the keys, whatever the batch, the block size or the device.
`select` takes requests one by one, each as long as it is; `select_fixed` takes a step of fixed
shape, all positions that a request could have, and reads nothing on the host.

    score(t) = sum over heads of weight * relu(query . key(t))      weight 1, 2, 4 or 8
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hisparse.device.rows import StepRows
from hisparse.engine.builtin_exact import QMAX, Linear, from_bytes, quantise, require_exact
from hisparse.errors import UsageError

INDEX_HEADS = 4
INDEX_WIDTH = 20
MAX_POSITIONS = 1 << 20  # the tie-break digits of a top-k key
HEAD_WEIGHTS = (1, 2, 4, 8)  # powers of two add no significant bits to a query
SELECT_ELEMENTS = 1 << 22  # scores of one selection call: bounds its memory at any context

Span = tuple[int, int, int, int]  # first token, end token, request row, context length at the end
KeysOf = Callable[[int, int], torch.Tensor]  # (request row, length) -> uint8 [length, INDEX_WIDTH]


def spans_of(step: StepRows, max_model_len: int) -> list[Span]:
    """The step's requests. Raises UsageError where `step` breaks the contract of `StepRows`."""
    rows, positions = step.rows, step.positions
    if positions.min() < 0 or positions.max() >= max_model_len:
        worst = positions.max() if positions.min() >= 0 else positions.min()
        raise UsageError(f"position {worst} is outside 0..max_model_len-1={max_model_len - 1}")
    cuts = np.flatnonzero(np.diff(rows)) + 1
    starts, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(rows)]
    rising = np.diff(positions) == 1
    rising[cuts - 1] = True
    if not rising.all() or len(np.unique(rows)) != len(starts):
        raise UsageError("tokens of one request must be adjacent, with positions rising by one")
    return [
        (a, b, int(rows[a]), int(positions[b - 1]) + 1) for a, b in zip(starts, ends, strict=True)
    ]


@dataclass(frozen=True)
class Indexer:
    """The weights of one index group's leader."""

    query: Linear
    key: Linear
    head_weight: Linear
    bias: torch.Tensor  # what every query likes: heavy hitters that outlive one step


class Selector:
    """Exact top-k selection, shared by all indexers.

    Args:
        top_k: rows a token attends to.
        max_model_len: positions there may be.
        device: where scores are computed.
    """

    def __init__(self, top_k: int, max_model_len: int, device: torch.device) -> None:
        self.top_k, self.device = top_k, device
        self._at = torch.arange(max_model_len, device=device)
        self._tie = (MAX_POSITIONS - 1 - self._at).double()
        self._head_weights = torch.tensor(HEAD_WEIGHTS, dtype=torch.float32, device=device)
        require_exact(INDEX_HEADS * INDEX_WIDTH * max(HEAD_WEIGHTS) * QMAX**2, "a top-k score")

    @staticmethod
    def row(indexer: Indexer, x: torch.Tensor) -> torch.Tensor:
        """Indexer rows to cache: int8 [n, INDEX_WIDTH]."""
        return quantise(indexer.key(x), indexer.key.scale)

    def select(
        self, indexer: Indexer, x: torch.Tensor, spans: list[Span], keys_of: KeysOf
    ) -> torch.Tensor:
        """The leader's selection for activations `x`, [n, width]: int32 [n, top_k], ascending,
        then -1 where there are too few."""
        q = self._query(indexer, x).transpose(0, 1)
        chosen = torch.full((len(x), self.top_k), MAX_POSITIONS, device=self.device)
        for start, end, row, length in spans:
            keys = from_bytes(keys_of(row, length))
            block = max(1, SELECT_ELEMENTS // (INDEX_HEADS * length))
            for i in range(start, end, block):
                j = min(end, i + block)
                self.best(q[:, i:j], keys[: length - (end - j)], chosen[i:j])
        return _ascending(chosen)

    def select_fixed(
        self, indexer: Indexer, x: torch.Tensor, last: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """`select` for a step of fixed shape, to the bit.

        last: int64 [n], the position of each line, -1 for padding, which selects nothing. keys:
        uint8 [requests, positions, INDEX_WIDTH]; n is a multiple of requests, whose lines adjoin.
        """
        requests, total, _ = keys.shape
        q = self._query(indexer, x).view(requests, -1, INDEX_WIDTH)  # lines and heads of a request
        score = torch.bmm(q, from_bytes(keys).transpose(1, 2)).relu_()
        score = score.view(len(x), INDEX_HEADS, total).sum(1)
        unique = score.double().mul_(MAX_POSITIONS).add_(self._tie[:total])
        unique.masked_fill_(self._at[:total] > last[:, None], -1.0)
        best = unique.topk(min(self.top_k, total), sorted=False)
        chosen = best.indices.masked_fill_(best.values < 0, MAX_POSITIONS)
        missing = self.top_k - chosen.shape[1]
        return _ascending(torch.nn.functional.pad(chosen, (0, missing), value=MAX_POSITIONS))

    def _query(self, indexer: Indexer, x: torch.Tensor) -> torch.Tensor:
        """Weighted queries, [n, INDEX_HEADS, INDEX_WIDTH]."""
        q = quantise(indexer.query(x), indexer.query.scale).add_(indexer.bias)
        q = q.clamp_(-QMAX, QMAX).view(-1, INDEX_HEADS, INDEX_WIDTH)
        head = torch.round(indexer.head_weight(x) * indexer.head_weight.scale + 1.5)
        head = self._head_weights[head.clamp_(0, len(HEAD_WEIGHTS) - 1).long()]
        # a positive weight commutes with relu, so it goes into the query: one pass less over scores
        return q * head[..., None]

    def best(self, q: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
        """Top-k positions of the last m tokens among T keys into `out`, int64 [m, k], unordered.

        Taken by unique keys score * 2**20 + (2**20 - 1 - position), exact below 2**53: ties
        prefer the earlier position, so that the selected set does not depend on the algorithm.
        """
        m, total = q.shape[1], len(keys)
        at = self._at[:total]
        future = at > at[total - m :, None] if m > 1 else None  # a last token has no future
        if total <= self.top_k:  # everything is selected, whatever its score
            out[:, :total] = at if future is None else at.masked_fill(future, MAX_POSITIONS)
            return
        score = (q.reshape(-1, INDEX_WIDTH) @ keys.T).relu_().view(INDEX_HEADS, m, total).sum(0)
        unique = score.double().mul_(MAX_POSITIONS).add_(self._tie[:total])
        if future is not None:
            unique.masked_fill_(future, -1.0)
        best = unique.topk(self.top_k, sorted=False)
        out[:] = best.indices.masked_fill_(best.values < 0, MAX_POSITIONS)


def _ascending(chosen: torch.Tensor) -> torch.Tensor:
    """Positions in order, MAX_POSITIONS as -1: int32."""
    chosen = chosen.sort(-1).values.int()
    return chosen.masked_fill_(chosen == MAX_POSITIONS, -1)
