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
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch

from hisparse.config import ModelLayout
from hisparse.device.rows import StepRows
from hisparse.engine.builtin_exact import (
    EXACT_F32,
    QMAX,
    RMS,
    Layer,
    Linear,
    coarse,
    from_bytes,
    norm,
    quantise,
    require_exact,
    to_bytes,
)
from hisparse.engine.builtin_indexer import (
    INDEX_HEADS,
    INDEX_WIDTH,
    MAX_POSITIONS,
    Indexer,
    Selector,
    Span,
    spans_of,
)
from hisparse.engine.builtin_kv import KVAccess, RowsBeside, StepCache
from hisparse.errors import ConfigError, UsageError

VOCAB = 384
EOS = 383
WIDTH = 128
HEADS = 4
LATENT = 96
ROPE = 32
ROW = LATENT + ROPE
MLP = 256
GROUPS = ((0, 1, 2), (3, 4, 5))
DRAFT_LAYER = 6
DRAFT_FROM = 3  # the layer whose weights it has, coarser
DRAFT_STEP = 16  # to multiples of this

GRID = 256.0  # residual steps in 1.0
RESIDUAL_MAX = float((1 << 20) - 1)
MAX_TOP_K = 2048
PHASES = 1 << 16
SOFTMAX_PEAK = 64  # 2048 * 64 * 127 < 2**24: a weighted sum over the whole top-k is exact
SOFTMAX_STEP = 256.0
SOFTMAX_TABLE = 128
PLACES = 251  # period of the additive position table: keeps greedy decoding out of short loops
EOS_HANDICAP = 0.6  # sigmas off the EOS logit: rare, but not never


Turn = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of each position's phases


class BuiltinModel:
    """Six MLA layers in two index groups, exact top-k, greedy choice; see the module docstring.

    seed: of the weights, 0..2**32-1. top_k: rows a token attends to, 1..2048. max_model_len:
    positions accepted, up to 2**20. draft: with a draft head, `propose`, whose layer and index
    group come last in the layout. device: any torch device; inputs and outputs stay on the host.
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
        self._build_tables()
        self._build_weights(np.random.RandomState(seed))

    # -- construction ----------------------------------------------------------------------------
    def _tensor(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _build_tables(self) -> None:
        turn = [2 * math.pi * i / PHASES for i in range(PHASES)]
        self._cos = self._tensor([round(QMAX * math.cos(a)) for a in turn])
        self._sin = self._tensor([round(QMAX * math.sin(a)) for a in turn])
        # phases a position turns each rotary pair by: from 1/8 turn down to one phase, geometric
        top = PHASES // 8
        steps = [round(top ** (1 - i / (ROPE // 2 - 1))) for i in range(ROPE // 2)]
        self._steps = torch.tensor(steps, dtype=torch.int64, device=self.device)
        decay = [round(SOFTMAX_PEAK * math.exp(-i / 24)) for i in range(SOFTMAX_TABLE - 1)]
        self._softmax = self._tensor([*decay, 0])
        require_exact(MAX_TOP_K * SOFTMAX_PEAK * QMAX, "a weighted sum over the top-k")

    def _build_weights(self, random: np.random.RandomState) -> None:
        # RandomState, because numpy promises its stream for ever; a Generator's may change
        def linear(inner: int, outer: int, gain: float = 1.0) -> Linear:
            require_exact(inner * QMAX**2, f"a sum of {inner} int8 products")
            weight = random.randint(-QMAX, QMAX + 1, size=(inner, outer))
            sigma = math.sqrt(QMAX * (QMAX + 1) / 3)
            return Linear(self._tensor(weight), gain / (sigma * math.sqrt(inner)))

        grid = GRID / RMS  # a unit-gain block adds 1.0 rms to the residual
        self._embed = self._tensor(random.randint(-256, 257, size=(VOCAB, WIDTH)))
        self._place = self._tensor(random.randint(-256, 257, size=(PLACES, WIDTH)))
        self._layers = [
            Layer(
                query=linear(WIDTH, HEADS * ROW),
                cached=linear(WIDTH, ROW),
                out=linear(HEADS * LATENT, WIDTH, grid),
                up=linear(WIDTH, MLP),
                down=linear(MLP, WIDTH, grid),
            )
            for _ in range(DRAFT_LAYER)
        ]
        self._indexers = [
            Indexer(
                query=linear(WIDTH, INDEX_HEADS * INDEX_WIDTH, 0.5),
                key=linear(WIDTH, INDEX_WIDTH),
                head_weight=linear(WIDTH, INDEX_HEADS, 2 / RMS),
                bias=self._tensor(random.randint(-40, 41, size=INDEX_HEADS * INDEX_WIDTH)),
            )
            for _ in GROUPS
        ]
        self._unembed = linear(WIDTH, VOCAB)
        if self.draft:
            self._layers.append(coarse(self._layers[DRAFT_FROM], DRAFT_STEP))
            self._indexers.append(self._indexers[1])
        self._eos_handicap = round(EOS_HANDICAP * RMS / self._unembed.scale)

    # -- the step --------------------------------------------------------------------------------
    @torch.inference_mode()
    def forward(self, tokens: np.ndarray, rows: StepRows, kv: KVAccess) -> np.ndarray:
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
            return np.zeros((0, VOCAB), dtype=np.float32)
        if tokens.min() < 0 or tokens.max() >= VOCAB:
            raise UsageError(f"tokens must lie in 0..{VOCAB - 1}")
        spans = spans_of(rows, self.max_model_len)
        h, turn = self._enter(tokens, rows)
        early = h = self._run_group(0, h, turn, spans, kv)
        for group in range(1, len(GROUPS)):
            h = self._run_group(group, h, turn, spans, kv)
        if self.draft:
            self._write_rows(len(GROUPS), DRAFT_LAYER, norm(early), turn, kv)
        return self._logits(h)

    @torch.inference_mode()
    def propose(self, tokens: np.ndarray, rows: StepRows, kv: StepCache, count: int) -> np.ndarray:
        """Drafts of the tokens that follow: int64 [m, count].

        tokens: int64 [m], the newest token of each request; `rows` its place, one a request, where
        no row is written yet. Reads the rows before it through `kv` and writes none: rows of
        drafts are kept beside the cache until the target verifies them.
        """
        beside, found = RowsBeside(kv, rows), []
        for ahead in range(count):
            step = StepRows(rows.rows, rows.positions + ahead)
            spans = spans_of(step, self.max_model_len)
            h, turn = self._enter(tokens, step)
            for group in (0, len(GROUPS)):
                h = self._run_group(group, h, turn, spans, beside)
            tokens = self.choose(self._logits(h))
            found.append(tokens)
            beside.advance()
        return np.stack(found, axis=1)

    def _enter(self, tokens: np.ndarray, rows: StepRows) -> tuple[torch.Tensor, Turn]:
        """Residual before the first layer, and the rotation of each position."""
        positions = torch.from_numpy(rows.positions.astype(np.int64)).to(self.device)
        phase = (positions[:, None] * self._steps) % PHASES
        h = self._embed[torch.from_numpy(tokens.astype(np.int64)).to(self.device)]
        return h + self._place[positions % PLACES], (self._cos[phase], self._sin[phase])

    def _write_rows(
        self, group: int, layer: int, x: torch.Tensor, turn: Turn, kv: KVAccess
    ) -> None:
        """Rows of a group's leader: latent and indexer."""
        kv.write(layer, self._row(layer, x, turn))
        kv.write_index(group, to_bytes(self._selector.row(self._indexers[group], x)))

    def _run_group(
        self, group: int, h: torch.Tensor, turn: Turn, spans: list[Span], kv: KVAccess
    ) -> torch.Tensor:
        """Residual after the layers of an index group."""
        layers = self.layout.index_groups[group]
        selected = self._tensor([])
        for layer in layers:
            x, top_k = norm(h), None
            if layer == layers[0]:
                self._write_rows(group, layer, x, turn, kv)
                keys_of = partial(kv.index_keys, group)
                top_k = self._selector.select(self._indexers[group], x, spans, keys_of)
                selected = torch.from_numpy(top_k >= 0).to(self.device)
            else:
                kv.write(layer, self._row(layer, x, turn))
            h = self._attend(layer, h, x, turn, kv.gather(layer, top_k), selected)
            h = self._mlp(layer, h)
        return h

    def _logits(self, h: torch.Tensor) -> np.ndarray:
        logits = self._unembed(norm(h))
        logits[:, EOS] -= self._eos_handicap
        result: np.ndarray = logits.cpu().numpy()
        return result

    def choose(self, logits: np.ndarray) -> np.ndarray:
        """Greedy choice: int64 [n]. Ties go to the lowest token id."""
        best: np.ndarray = np.argmax(logits, axis=-1).astype(np.int64)
        return best

    # -- parts of a layer ------------------------------------------------------------------------
    def _rope(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Rotate int8 [n, heads, ROPE] by its position; int8 again. Products are exact."""
        cos, sin = turn[0][:, None], turn[1][:, None]
        a, b = x[..., : ROPE // 2], x[..., ROPE // 2 :]
        return quantise(torch.cat((a * cos - b * sin, a * sin + b * cos), -1), 1 / QMAX)

    def _row(self, layer: int, x: torch.Tensor, turn: Turn) -> np.ndarray:
        """The rows to cache: uint8 [n, row_bytes]."""
        cached = self._layers[layer].cached
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
        gathered: np.ndarray,
        selected: torch.Tensor,
    ) -> torch.Tensor:
        """Residual after attention over `gathered`, uint8 [n, k, row_bytes], where `selected`."""
        weights = self._layers[layer]
        q = quantise(weights.query(x), weights.query.scale).view(-1, HEADS, ROW)
        q = torch.cat((q[..., :LATENT], self._rope(q[..., LATENT:], turn)), -1)
        kv = from_bytes(gathered, self.device)
        score = torch.bmm(q, kv.transpose(1, 2))
        hidden = ~selected[:, None]
        score.masked_fill_(hidden, -float(EXACT_F32))
        below = score.amax(-1, keepdim=True) - score
        step = torch.floor(below * (1 / SOFTMAX_STEP)).clamp_(max=SOFTMAX_TABLE - 1)
        weight = self._softmax[step.long()].masked_fill_(hidden, 0.0)
        mixed = torch.bmm(weight, kv[..., :LATENT]) / weight.sum(-1, keepdim=True)
        context = quantise(mixed, 1.5).view(-1, HEADS * LATENT)
        return self._add(h, weights.out(context), weights.out.scale)

    def _mlp(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        weights = self._layers[layer]
        up = quantise(weights.up(norm(h)), weights.up.scale)
        # an odd square: relu's would have a mean, which makes one token win every time
        return self._add(h, weights.down(quantise(up * up.abs(), 1 / 32)), weights.down.scale)

    def _add(self, h: torch.Tensor, out: torch.Tensor, scale: float) -> torch.Tensor:
        return (h + torch.round(out * scale)).clamp_(-RESIDUAL_MAX, RESIDUAL_MAX)
