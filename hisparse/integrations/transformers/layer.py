"""`HiSparseLayer`: one layer of a `HiSparseCache`, as transformers addresses it.

Holds nothing: what is written and read goes through the cache. What a rectangle of tensors can do
and requests with rows of their own cannot is refused, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from hisparse.errors import UsageError

if TYPE_CHECKING:
    from hisparse.integrations.transformers.cache import HiSparseCache


class HiSparseLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer, as transformers addresses it: hands everything to its cache."""

    def __init__(self, cache: HiSparseCache, layer: int) -> None:
        super().__init__()
        self.cache = cache
        self.layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """The backend made everything at its start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Writes latents [lines, 1, width, kv_lora_rank] and [.., qk_rope_head_dim]; answers
        itself, which the attention function reads rows from."""
        self.cache.write(self.layer, key_states, value_states)
        return self, self

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Writes the indexer's keys [lines, width, head_dim]; answers those of all columns, zeros
        at padding."""
        return self.cache.write_index(self.layer, indexer_key_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.columns

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        _refuse("offload", "the tiers move pages by themselves")

    def prefetch(self) -> None:
        _refuse("prefetch", "the tiers move pages by themselves")

    def reset(self) -> None:
        self.cache.close()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        _refuse("reorder_cache", "beams share rows that a request owns alone: use num_beams=1")

    def crop(self, tokens_to_remove: int) -> None:
        _refuse("crop", "rows that were accepted stay: generate without an assistant or look-up")

    def batch_repeat_interleave(self, repeats: int) -> None:
        _refuse("batch_repeat_interleave", "a request owns its rows alone: repeat the prompts")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        _refuse("batch_select_indices", "lines stay where they are: end those that are done")


def _refuse(verb: str, why: str) -> NoReturn:
    raise UsageError(f"HiSparseCache.{verb}: {why}")
