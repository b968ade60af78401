"""The oracle: a dense cache and a plain decode loop that serving is compared with, bit for bit.

Contract: shares no code with the tiers under test. Each request owns one contiguous tensor a cache,
on the model's device; there are no pages, no blocks, no prefix sharing, no eviction and no limit,
so that nothing here can be wrong in the way that a tier can be wrong. Given a batch-invariant
model, `reference_decode` says what every request's tokens, logits and cached rows must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from hisparse.config import ModelLayout
from hisparse.device.access import KVAccess
from hisparse.device.rows import StepRows
from hisparse.engine.builtin_kv import FixedCache, FixedKV, StepCache
from hisparse.errors import UsageError

BATCH = 32  # requests that `reference_decode_many` decodes together


class Model(Protocol):
    """What the oracle asks of a model, and a runner; each token's logits are to depend on its own
    context alone, to the bit."""

    layout: ModelLayout
    vocab_size: int
    eos: int
    device: torch.device

    def forward(self, tokens: np.ndarray, rows: StepRows, kv: KVAccess) -> torch.Tensor: ...

    def choose(self, logits: torch.Tensor) -> torch.Tensor: ...


class FixedModel(Model, Protocol):
    """What steps of fixed shape and drafts ask beyond it; `BuiltinModel` is one."""

    def forward_fixed(self, tokens: torch.Tensor, rows: StepRows, kv: FixedKV) -> torch.Tensor: ...

    def propose(
        self, tokens: np.ndarray, rows: StepRows, kv: StepCache, count: int
    ) -> torch.Tensor: ...

    def propose_fixed(
        self, tokens: torch.Tensor, rows: StepRows, kv: FixedCache, count: int
    ) -> torch.Tensor: ...


class DenseCache(KVAccess):
    """A `KVAccess` that keeps every row of every request. Call `begin` before each step."""

    def __init__(self, layout: ModelLayout, device: torch.device | str = "cpu") -> None:
        self._layout = layout
        self._device = torch.device(device)
        self._kv: dict[int, torch.Tensor] = {}  # request row -> uint8 [layers, capacity, row_bytes]
        self._index: dict[int, torch.Tensor] = {}  # -> uint8 [groups, capacity, index_row_bytes]
        self._spans: list[tuple[int, int, int, int]] = []  # first, end, request row, position
        self._selection: torch.Tensor | None = None

    def begin(self, step: StepRows) -> None:
        """Declare the tokens that the coming `write` and `gather` calls are about."""
        cuts = (np.flatnonzero(np.diff(step.rows)) + 1).tolist()
        bounds = [0, *cuts, len(step.rows)]
        self._spans = [
            (a, b, int(step.rows[a]), int(step.positions[a])) for a, b in pairwise(bounds) if b > a
        ]
        self._selection = None
        for a, b, row, position in self._spans:
            self._reserve(row, position + b - a)

    def free(self, row: int) -> None:
        """Forget request row `row`, which may then name another request."""
        self._kv.pop(row, None)
        self._index.pop(row, None)

    def rows(self, row: int, length: int) -> np.ndarray:
        """A copy of the first `length` rows: uint8 [layers, length, row_bytes]."""
        copied: np.ndarray = self._kv[row][:, :length].clone().cpu().numpy()
        return copied

    def _reserve(self, row: int, length: int) -> None:
        layout = self._layout
        have = self._kv[row].shape[1] if row in self._kv else 0
        if length <= have:
            return
        room = max(256, 2 * have, length)
        for store, count, width in (
            (self._kv, layout.layers, layout.row_bytes),
            (self._index, len(layout.index_groups), layout.index_row_bytes),
        ):
            grown = torch.zeros((count, room, width), dtype=torch.uint8, device=self._device)
            if have:
                grown[:, :have] = store[row]
            store[row] = grown

    def write(self, layer: int, data: torch.Tensor) -> None:
        """Store the step's rows of `layer`: uint8 [n, row_bytes]."""
        for a, b, row, position in self._spans:
            self._kv[row][layer, position : position + b - a] = data[a:b]

    def write_index(self, group: int, data: torch.Tensor) -> None:
        """Store the step's indexer rows of `group`: uint8 [n, index_row_bytes]."""
        for a, b, row, position in self._spans:
            self._index[row][group, position : position + b - a] = data[a:b]

    def index_keys(self, group: int, row: int, length: int) -> torch.Tensor:
        """A view of indexer rows 0..length-1 of request row `row`: uint8 [length, bytes]."""
        return self._index[row][group, :length]

    def gather(self, layer: int, top_k: torch.Tensor | None) -> torch.Tensor:
        """Selected rows: uint8 [n, k, row_bytes], zeros at -1. None repeats the last selection."""
        if top_k is not None:
            self._selection = top_k
        if self._selection is None:
            raise UsageError(f"layer {layer} is a follower, and no leader has selected this step")
        chosen = self._selection
        parts = [self._kv[row][layer][chosen[a:b]] for a, b, row, _ in self._spans]
        return torch.cat(parts).masked_fill_((chosen < 0)[..., None], 0)


@dataclass(frozen=True)
class ReferenceResult:
    """What one request must produce."""

    tokens: list[int]
    """The generated ids, EOS included where it ended the request."""
    logits: np.ndarray
    """float32 [len(tokens), vocab]: what each token was chosen from."""
    rows: np.ndarray
    """uint8 [layers, positions, row_bytes], positions = len(prompt) + len(tokens) - 1: the last
    token is chosen but never fed. Empty, [layers, 0, row_bytes], where rows were not kept."""


@dataclass
class _Running:
    """A request in the loop: `pending` are the tokens whose rows are not computed yet."""

    number: int
    pending: np.ndarray
    max_new: int
    fed: int = 0
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)


def reference_decode(
    model: Model, prompt: np.ndarray, max_new: int, *, chunk: int
) -> ReferenceResult:
    """Decode one request alone: prefill by `chunk` tokens, then greedily to `max_new` or EOS.

    prompt: integers [n], n >= 1. Raises UsageError for an empty prompt, max_new < 1 or chunk < 1.
    """
    return reference_decode_many(model, [prompt], [max_new], chunk=chunk)[0]


def reference_decode_many(
    model: Model,
    prompts: Sequence[np.ndarray],
    max_news: Sequence[int],
    *,
    chunk: int,
    progress: Callable[[int, int], None] | None = None,
    batch: int = BATCH,
    keep_rows: bool = True,
) -> list[ReferenceResult]:
    """`reference_decode` of each prompt, up to `batch` of them at a time: the model's batch
    invariance makes the results equal, and a step costs little more for many than for one.

    progress: called with (finished, total) after each request. keep_rows=False leaves
    `ReferenceResult.rows` empty, to save memory over a long trace. Raises as `reference_decode`.
    """
    if len(prompts) != len(max_news):
        raise UsageError(f"{len(prompts)} prompts and {len(max_news)} max_news: give one of each")
    if chunk < 1 or batch < 1:
        raise UsageError(f"chunk={chunk}, batch={batch}: both must be at least 1")
    for number, (prompt, max_new) in enumerate(zip(prompts, max_news, strict=True)):
        if len(prompt) < 1 or max_new < 1:
            raise UsageError(
                f"request {number} has {len(prompt)} prompt tokens and max_new={max_new}: "
                "both must be at least 1"
            )
    cache = DenseCache(model.layout, model.device)
    waiting = [
        _Running(number, np.asarray(prompt, dtype=np.int64), max_new)
        for number, (prompt, max_new) in enumerate(zip(prompts, max_news, strict=True))
    ][::-1]
    results: dict[int, ReferenceResult] = {}
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop())
        for request in _step(model, cache, running, chunk):
            running.remove(request)
            length = request.fed if keep_rows else 0
            results[request.number] = ReferenceResult(
                request.tokens, np.stack(request.logits), cache.rows(request.number, length)
            )
            cache.free(request.number)
            if progress is not None:
                progress(len(results), len(prompts))
    return [results[number] for number in range(len(prompts))]


def _step(model: Model, cache: DenseCache, running: list[_Running], chunk: int) -> list[_Running]:
    """One forward pass over the next tokens of every running request; returns the finished."""
    parts = [request.pending[:chunk] for request in running]
    sizes = [len(part) for part in parts]
    at = [np.arange(r.fed, r.fed + n) for r, n in zip(running, sizes, strict=True)]
    numbers = np.array([request.number for request in running], dtype=np.int32)
    step = StepRows(np.repeat(numbers, sizes), np.concatenate(at).astype(np.int64))
    cache.begin(step)
    logits = model.forward(np.concatenate(parts), step, cache)
    last = logits[(np.cumsum(sizes) - 1).tolist()]
    chosen, kept = model.choose(last).tolist(), last.cpu().numpy()
    finished = []
    for request, size, row, token in zip(running, sizes, kept, chosen, strict=True):
        request.fed += size
        request.pending = request.pending[size:]
        if len(request.pending):
            continue  # still inside its prompt
        request.tokens.append(token)
        request.logits.append(row.copy())
        request.pending = np.array([token], dtype=np.int64)
        if token == model.eos or len(request.tokens) == request.max_new:
            finished.append(request)
    return finished
