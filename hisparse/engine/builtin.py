"""The built-in model: a small DeepSeek-Sparse-Attention decoder with seeded random weights.

Contract: a token's logits depend on its own context alone, to the bit, whatever the batch size,
chunk size, order of requests or device. A wrong, stale or missing cache row is then a difference
between two arrays and not a matter of tolerance.

Design reason: floating-point sums depend on the order in which a BLAS or a kernel reduces, and
that order changes with shape and device. Here every reduction is over *integers carried in
floats*, each small enough that no partial sum leaves the exact range (2**24 in float32, 2**53 in
float64), so that any order gives the same bits. Everything else is elementwise and correctly
rounded by IEEE 754 (+ - * / sqrt round floor clamp compare) or a table lookup; no exp, softmax or
sin, whose vector and scalar code paths may differ. Multiplies and adds stay separate calls, so
that no compiler fuses them.

    residual   integers in units of 2**-8, |h| < 2**20    every block's output is rounded to them
    activation integers in [-127, 127], rms 32            requantised after every matmul
    weights    integers in [-127, 127], as float32        K * 127**2 < 2**24, checked
    operands   of every matmul: at most 8 significant bits, so TF32 or bf16 products are exact too
    cached row int8: 96 latents | 32 roped                128 B a token and layer
    index row  int8: 20                                   20 B a token and group (1/19 of 6 rows)

Order in a layer: the step's rows are written, the leader selects, the cache gathers, attention
runs. A token therefore sees itself and the earlier tokens of its own chunk.

The draft head (`draft=True`) is the first index group and then one layer of its own, an index group
with rows in the cache like any other: the weights of the fourth layer, coarser. Its rows are
written after the target's forward, from what the first group made of them; it changes no logit.

Tensors stay on the model's device from the embedding to the logits. `forward` and `propose` take
requests as long as they are; `forward_fixed` and `propose_fixed` are the same for a step of fixed
shape, whose rows lie on the device too: padding lines (request row -1) select nothing, and nothing
is read on the host, so that a CUDA graph can hold the step. Both make the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from hisparse.config import ModelLayout
from hisparse.device.access import KVAccess
from hisparse.device.rows import StepRows
from hisparse.engine.accelerator import upload
from hisparse.engine.builtin_exact import (
    EXACT_F32,
    QMAX,
    RMS,
    from_bytes,
    norm,
    quantise,
    to_bytes,
)
from hisparse.engine.builtin_indexer import INDEX_WIDTH, MAX_POSITIONS, Selector, spans_of
from hisparse.engine.builtin_kv import (
    FixedCache,
    FixedKV,
    FixedRowsBeside,
    RowsBeside,
    StepCache,
)
from hisparse.engine.builtin_weights import (
    DRAFT_LAYER,
    EOS,
    EOS_HANDICAP,
    GROUPS,
    HEADS,
    LATENT,
    MAX_TOP_K,
    PHASES,
    PLACES,
    RESIDUAL_MAX,
    ROPE,
    ROW,
    SOFTMAX_STEP,
    SOFTMAX_TABLE,
    VOCAB,
    build,
)
from hisparse.errors import ConfigError, UsageError

__all__ = ["DRAFT_LAYER", "EOS", "GROUPS", "ROW", "VOCAB", "BuiltinModel"]

Turn = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of each position's phases
Select = Callable[[int, torch.Tensor], torch.Tensor]  # (group, activations) -> int32 [n, top_k]


class BuiltinModel:
    """Six MLA layers in two index groups, exact top-k, greedy choice; see the module docstring.

    seed: of the weights, 0..2**32-1. top_k: rows a token attends to, 1..2048. max_model_len:
    positions accepted, up to 2**20. draft: with a draft head, `propose`, whose layer and index
    group come last in the layout. device: any torch device.
    Raises ConfigError when an argument would leave the exact range.
    """

    vocab_size = VOCAB
    eos = EOS

    def __init__(
        self,
        *,
        seed: int,
        top_k: int,
        max_model_len: int,
        draft: bool = False,
        device: str | torch.device = "cpu",
    ) -> None:
        if not 1 <= top_k <= MAX_TOP_K:
            raise ConfigError(f"top_k={top_k}: use 1..{MAX_TOP_K}")
        if not 1 <= max_model_len <= MAX_POSITIONS:
            raise ConfigError(f"max_model_len={max_model_len}: use 1..{MAX_POSITIONS}")
        if not 0 <= seed < 1 << 32:
            raise ConfigError(f"seed={seed}: use 0..2**32-1")
        self.seed, self.top_k, self.max_model_len = seed, top_k, max_model_len
        self.device = torch.device(device)
        self.draft = draft
        groups = (*GROUPS, (DRAFT_LAYER,)) if draft else GROUPS
        self.layout = ModelLayout(row_bytes=ROW, index_row_bytes=INDEX_WIDTH, index_groups=groups)
        self._selector = Selector(top_k, max_model_len, self.device)
        self._weights, self._tables = build(seed, self.device, draft=draft)
        self._eos_handicap = round(EOS_HANDICAP * RMS / self._weights.unembed.scale)
        # one integer a token id: what chooses the lowest id among equals, whatever reduces
        self._prefer = torch.arange(VOCAB - 1, -1, -1, device=self.device).double()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # there for whatever stream runs a step

    # -- the step --------------------------------------------------------------------------------
    @torch.inference_mode()
    def forward(self, tokens: np.ndarray, rows: StepRows, kv: KVAccess) -> torch.Tensor:
        """Logits of every token of the step: float32 [n, vocab], integer-valued.

        tokens: integers [n]. Writes the step's rows of every layer and group through `kv`, then
        reads what the indexers select. Raises UsageError, before the first write, for tokens,
        positions or an order that the contract forbids.
        """
        if not len(tokens) == len(rows.rows) == len(rows.positions):
            raise UsageError(
                "a step has one token, one row and one position each, got lengths "
                f"{len(tokens)}, {len(rows.rows)}, {len(rows.positions)}"
            )
        if len(tokens) == 0:
            return torch.zeros((0, VOCAB), device=self.device)
        if tokens.min() < 0 or tokens.max() >= VOCAB:
            raise UsageError(f"tokens must lie in 0..{VOCAB - 1}")
        select = self._select(rows, kv)
        known = upload(tokens.astype(np.int64), self.device)
        positions = upload(rows.positions.astype(np.int64), self.device)
        return self._target(known, positions, select, kv)

    @torch.inference_mode()
    def forward_fixed(self, tokens: torch.Tensor, rows: StepRows, kv: FixedKV) -> torch.Tensor:
        """`forward` for a step of fixed shape: tokens int64 [n], and `rows`, on the device."""
        return self._target(tokens, rows.positions, self._select_fixed(rows, 0, kv), kv)

    @torch.inference_mode()
    def propose(
        self, tokens: np.ndarray, rows: StepRows, kv: StepCache, count: int
    ) -> torch.Tensor:
        """Drafts of the tokens that follow: int64 [m, count].

        tokens: int64 [m], the newest token of each request; `rows` its place, one a request, where
        no row is written yet. Reads the rows before it through `kv` and writes none: rows of
        drafts are kept beside the cache until the target verifies them.
        """
        newest, first = upload(tokens, self.device), upload(rows.positions, self.device)
        beside = RowsBeside(kv, rows, first)

        def select_at(ahead: int) -> Select:
            return self._select(StepRows(rows.rows, rows.positions + ahead), beside)

        return self._drafts(newest, first, beside, select_at, count)

    @torch.inference_mode()
    def propose_fixed(
        self, tokens: torch.Tensor, rows: StepRows, kv: FixedCache, count: int
    ) -> torch.Tensor:
        """`propose` for a step of fixed shape; padding requests get drafts without meaning."""
        beside = FixedRowsBeside(kv, rows, rows.positions)
        select_at = partial(self._select_fixed, rows, kv=beside)
        return self._drafts(tokens, rows.positions, beside, select_at, count)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Greedy choice: int64 [n]. Ties go to the lowest token id."""
        return (logits.double() * VOCAB + self._prefer).argmax(-1)

    def _select(self, rows: StepRows, kv: KVAccess) -> Select:
        spans = spans_of(rows, self.max_model_len)

        def select(group: int, x: torch.Tensor) -> torch.Tensor:
            keys_of = partial(kv.index_keys, group)
            return self._selector.select(self._weights.indexers[group], x, spans, keys_of)

        return select

    def _select_fixed(self, rows: StepRows, ahead: int, kv: FixedKV) -> Select:
        last = (rows.positions + ahead).masked_fill(rows.rows < 0, -1)

        def select(group: int, x: torch.Tensor) -> torch.Tensor:
            keys = kv.all_keys(group, self.max_model_len)
            return self._selector.select_fixed(self._weights.indexers[group], x, last, keys)

        return select

    # -- passes over the layers ------------------------------------------------------------------
    def _target(
        self, tokens: torch.Tensor, positions: torch.Tensor, select: Select, kv: KVAccess
    ) -> torch.Tensor:
        h, turn = self._enter(tokens, positions)
        early = h = self._run_group(0, h, turn, select, kv)
        for group in range(1, len(GROUPS)):
            h = self._run_group(group, h, turn, select, kv)
        if self.draft:
            self._write_rows(len(GROUPS), DRAFT_LAYER, norm(early), turn, kv)
        return self._logits(h)

    def _drafts(
        self,
        tokens: torch.Tensor,
        first: torch.Tensor,
        beside: RowsBeside,
        select_at: Callable[[int], Select],
        count: int,
    ) -> torch.Tensor:
        found = []
        for ahead in range(count):
            select = select_at(ahead)
            h, turn = self._enter(tokens, first + ahead)
            for group in (0, len(GROUPS)):
                h = self._run_group(group, h, turn, select, beside)
            tokens = self.choose(self._logits(h))
            found.append(tokens)
            beside.advance()
        return torch.stack(found, 1)

    def _enter(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Turn]:
        """Residual before the first layer, and the rotation of each position."""
        tables = self._tables
        phase = (positions[:, None] * tables.steps) % PHASES
        h = self._weights.embed[tokens] + tables.place[positions % PLACES]
        return h, (tables.cos[phase], tables.sin[phase])

    def _write_rows(
        self, group: int, layer: int, x: torch.Tensor, turn: Turn, kv: KVAccess
    ) -> None:
        """Rows of a group's leader: latent and indexer."""
        kv.write(layer, self._row(layer, x, turn))
        kv.write_index(group, to_bytes(self._selector.row(self._weights.indexers[group], x)))

    def _run_group(
        self, group: int, h: torch.Tensor, turn: Turn, select: Select, kv: KVAccess
    ) -> torch.Tensor:
        """Residual after the layers of an index group."""
        leader, *followers = self.layout.index_groups[group]
        x = norm(h)
        self._write_rows(group, leader, x, turn, kv)
        top_k = select(group, x)
        selected = top_k >= 0
        h = self._attend(leader, h, x, turn, kv.gather(leader, top_k), selected)
        h = self._mlp(leader, h)
        for layer in followers:
            x = norm(h)
            kv.write(layer, self._row(layer, x, turn))
            h = self._attend(layer, h, x, turn, kv.gather(layer, None), selected)
            h = self._mlp(layer, h)
        return h

    def _logits(self, h: torch.Tensor) -> torch.Tensor:
        logits = self._weights.unembed(norm(h))
        logits[:, EOS] -= self._eos_handicap
        return logits

    # -- parts of a layer ------------------------------------------------------------------------
    def _rope(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Rotate int8 [n, heads, ROPE] by its position; int8 again. Products are exact."""
        cos, sin = turn[0][:, None], turn[1][:, None]
        a, b = x[..., : ROPE // 2], x[..., ROPE // 2 :]
        return quantise(torch.cat((a * cos - b * sin, a * sin + b * cos), -1), 1 / QMAX)

    def _row(self, layer: int, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        """The rows to cache: uint8 [n, row_bytes]."""
        cached = self._weights.layers[layer].cached
        row = quantise(cached(x), cached.scale)[:, None]
        return to_bytes(
            torch.cat((row[..., :LATENT], self._rope(row[..., LATENT:], turn)), -1)[:, 0]
        )

    def _attend(
        self,
        layer: int,
        h: torch.Tensor,
        x: torch.Tensor,
        turn: Turn,
        gathered: torch.Tensor,
        selected: torch.Tensor,
    ) -> torch.Tensor:
        """Residual after attention over `gathered`, uint8 [n, k, row_bytes], where `selected`."""
        weights = self._weights.layers[layer]
        q = quantise(weights.query(x), weights.query.scale).view(-1, HEADS, ROW)
        q = torch.cat((q[..., :LATENT], self._rope(q[..., LATENT:], turn)), -1)
        kv = from_bytes(gathered)
        score = torch.bmm(q, kv.transpose(1, 2))
        hidden = ~selected[:, None]
        score.masked_fill_(hidden, -float(EXACT_F32))
        below = score.amax(-1, keepdim=True) - score
        step = torch.floor(below * (1 / SOFTMAX_STEP)).clamp_(max=SOFTMAX_TABLE - 1)
        weight = self._tables.softmax[step.long()].masked_fill_(hidden, 0.0)
        total = weight.sum(-1, keepdim=True).clamp_(min=1)  # of padding: 0, and no NaN
        mixed = torch.bmm(weight, kv[..., :LATENT]) / total
        context = quantise(mixed, 1.5).view(-1, HEADS * LATENT)
        return self._add(h, weights.out(context), weights.out.scale)

    def _mlp(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        weights = self._weights.layers[layer]
        up = quantise(weights.up(norm(h)), weights.up.scale)
        # an odd square: relu's would have a mean, which makes one token win every time
        return self._add(h, weights.down(quantise(up * up.abs(), 1 / 32)), weights.down.scale)

    def _add(self, h: torch.Tensor, out: torch.Tensor, scale: float) -> torch.Tensor:
        return (h + torch.round(out * scale)).clamp_(-RESIDUAL_MAX, RESIDUAL_MAX)
