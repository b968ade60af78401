"""`ServedModel`: a causal model of transformers with an indexer, in continuous batching.

Contract: the model's own `forward` computes every number but attention over the selected rows. A
step's tokens, of however many requests, are one batch of sequences of one token each::

    input_ids [n, 1]   position_ids [n, 1]   mask bool [n, 1, 1, T]: the positions before its own

What it caches is what the tiers hold: of a token and layer one latent row, ``c_kv | k_rope``, and
of an index group one indexer key. `update` and `update_indexer` write them through the step's
`KVAccess`; the indexer scores the keys that come back, and attention gets the rows that it selects.

A token's logits depend on its own context alone, to the bit (see `batch_invariant`).
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from hisparse.config import ModelLayout
from hisparse.device.access import KVAccess
from hisparse.device.rows import StepRows
from hisparse.errors import UsageError
from hisparse.integrations.transformers.batch_invariant import ROWS, TILE, BatchInvariant
from hisparse.integrations.transformers.latent import attention_modules, expand, pass_latents
from hisparse.integrations.transformers.layout import layout_of

ATTENTION = "hisparse_step"


class ServedModel:
    """`model` as the serving loop and the oracle ask for it.

    Args:
        model: DeepSeek-V3.2 or GLM-5 (``deepseek_v32``, ``glm_moe_dsa``), float32, on the CPU. Its
            attention is replaced for good: it serves nothing else from now on.
        max_model_len: positions accepted.
    """

    def __init__(self, model: PreTrainedModel, *, max_model_len: int) -> None:
        config = model.config
        self.vocab_size: int = config.vocab_size
        self.eos: int = config.eos_token_id
        self.max_model_len = max_model_len
        self.device = torch.device("cpu")
        self.layout = layout_of(model)
        self._model = model.eval()
        self._top_k: int = config.index_topk
        pass_latents(model)
        AttentionInterface.register(ATTENTION, attend)
        AttentionMaskInterface.register(ATTENTION, eager_mask)
        model.set_attn_implementation(ATTENTION)
        model.set_experts_implementation("batched_mm")  # one product a token and expert
        takes = inspect.signature(type(attention_modules(model)[0]).forward).parameters
        self._cache_argument = "cache" if "cache" in takes else "past_key_values"

    @torch.no_grad()
    def forward(self, tokens: np.ndarray, rows: StepRows, kv: KVAccess) -> torch.Tensor:
        """Logits of every token of the step: float32 [n, vocab].

        tokens: integers [n]. Writes the step's rows of every layer and group through `kv`, then
        reads what the indexers select. Raises UsageError for a position out of range.
        """
        n = len(tokens)
        if n == 0:
            return torch.zeros((0, self.vocab_size))
        if rows.positions.min() < 0 or rows.positions.max() >= self.max_model_len:
            raise UsageError(
                f"positions {rows.positions.min()}..{rows.positions.max()} are outside "
                f"0..max_model_len-1={self.max_model_len - 1}"
            )
        padded = -(-n // ROWS) * ROWS
        step = StepKV(kv, rows, self.layout, self._top_k, padded)
        with BatchInvariant():  # type: ignore[no-untyped-call]
            out = self._model(
                input_ids=_padded(tokens, padded)[:, None],
                position_ids=step.positions[:, None],
                attention_mask=step.mask,
                use_cache=True,
                **{self._cache_argument: step},
            )
        logits: torch.Tensor = out.logits[:n, 0]
        return logits

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Greedy choice: int64 [n]. Ties go to the lowest token id."""
        return logits.argmax(-1)


class StepKV(Cache):  # type: ignore[misc]
    """The cache that the model sees during one step; what it holds lies behind `kv`.

    Args:
        kv: where rows are written and read.
        rows: the step's tokens.
        layout: of the model.
        top_k: positions that an indexer selects.
        padded: length of the batch; what lies behind the step's tokens is padding, which writes
            nothing and reads zeros.
    """

    def __init__(
        self, kv: KVAccess, rows: StepRows, layout: ModelLayout, top_k: int, padded: int
    ) -> None:
        super().__init__(layers=[])
        self._kv, self._layout, self._top_k = kv, layout, top_k
        self._n, self._padded = len(rows.rows), padded
        cuts = (np.flatnonzero(np.diff(rows.rows)) + 1).tolist()
        bounds = pairwise([0, *cuts, self._n])
        self._spans = [(a, b, int(rows.rows[a]), int(rows.positions[b - 1]) + 1) for a, b in bounds]
        self.positions = _padded(rows.positions, padded)
        self._contexts = -(-(int(rows.positions.max()) + 1) // TILE) * TILE
        at = torch.arange(self._contexts)
        self.mask = (at <= self.positions[:, None])[:, None, None]
        self._leaders = {group[0]: i for i, group in enumerate(layout.index_groups)}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions of the longest context."""
        return self._contexts

    def update(
        self, latent: torch.Tensor, rope: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[tuple[StepKV, int], tuple[StepKV, int]]:
        """Store [n, 1, 1, c_kv] and [n, 1, 1, k_rope]. Attention gets a handle, not rows."""
        row = torch.cat((latent, rope), -1)[: self._n, 0, 0]
        self._kv.write(layer, row.contiguous().view(torch.uint8))
        return (self, layer), (self, layer)

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """Store [n, 1, d]; returns each token's context, [n, T, d], zeros behind it."""
        group = self._leaders[layer]
        self._kv.write_index(group, keys[: self._n, 0].contiguous().view(torch.uint8))
        out = keys.new_zeros((self._padded, self._contexts, keys.shape[-1]))
        for a, b, row, length in self._spans:
            held = self._kv.index_keys(group, row, length)
            out[a:b, :length] = held.contiguous().view(keys.dtype)
        return out

    def gather(self, layer: int, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that the leader's indexer selected, float32 [n, k, row], and which of them there
        are: bool [n, k]. indices: [n, 1, at most k], positions that may lie behind the token."""
        top_k: torch.Tensor | None = None
        if layer in self._leaders:
            behind = torch.iinfo(torch.int32).max
            chosen = indices[: self._n, 0].int()
            chosen = chosen.masked_fill(chosen > self.positions[: self._n, None], behind)
            chosen = chosen.sort(-1).values
            chosen = chosen.masked_fill(chosen == behind, -1)
            top_k = torch.nn.functional.pad(chosen, (0, self._top_k - chosen.shape[1]), value=-1)
            self._selected = _padded(top_k >= 0, self._padded)
        rows = _padded(self._kv.gather(layer, top_k), self._padded).view(torch.float32)
        return rows, self._selected


def attend(
    module: Any,
    query: torch.Tensor,
    key: tuple[StepKV, int],
    value: Any,
    attention_mask: torch.Tensor,
    *,
    scaling: float,
    indices: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of [n, heads, 1, d] over the selected rows of each token: [n, 1, heads, v]."""
    step, layer = key
    rows, selected = step.gather(layer, indices)
    keys, values = expand(module, rows)
    scores = torch.matmul(query, keys.transpose(2, 3)) * scaling
    scores = scores.masked_fill(~selected[:, None, None], torch.finfo(scores.dtype).min)
    mixed = torch.matmul(scores.softmax(-1), values)
    return mixed.transpose(1, 2).contiguous(), None


def _padded(values: np.ndarray | torch.Tensor, length: int) -> torch.Tensor:
    """`values`, zeros behind, as a tensor of `length` rows."""
    given = torch.as_tensor(values)
    out = given.new_zeros((length, *given.shape[1:]))
    out[: len(given)] = given
    return out
