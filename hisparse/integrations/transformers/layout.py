"""What a model costs a token, read off its modules, and a configuration of tiers for it.

Pure: the model is looked at, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hisparse.config import HiSparseConfig, ModelLayout
from hisparse.config_check import checked_config
from hisparse.integrations.transformers.latent import attention_modules

HOT_ROWS_PER_TOP_K = 2


@dataclass(frozen=True)
class RowFormat:
    """Values of a KV row and of an indexer row, and their types."""

    latent: int
    rotated: int
    dtype: torch.dtype
    index: int
    index_dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return (self.latent + self.rotated) * self.dtype.itemsize

    @property
    def index_row_bytes(self) -> int:
        return self.index * self.index_dtype.itemsize


def row_format(model: nn.Module) -> RowFormat:
    """Of the rows that `model` caches."""
    attention = attention_modules(model)[0]
    return RowFormat(
        attention.kv_lora_rank,
        attention.qk_rope_head_dim,
        attention.kv_a_proj_with_mqa.weight.dtype,
        attention.indexer.head_dim,
        attention.indexer.wk.weight.dtype,
    )


def layout_of(model: nn.Module) -> ModelLayout:
    """Row sizes and index groups: layers without an indexer follow the one before them."""
    made = row_format(model)
    groups: list[list[int]] = []
    for layer, attention in sorted(attention_modules(model).items()):
        if attention.indexer is not None:
            groups.append([])
        groups[-1].append(layer)
    return ModelLayout(
        row_bytes=made.row_bytes,
        index_row_bytes=made.index_row_bytes,
        index_groups=tuple(tuple(group) for group in groups),
    )


def config_of(model: nn.Module, **sections: Any) -> HiSparseConfig:
    """A configuration for `model`: layout and top-k are the model's, the rest is given.

    Args:
        sections: `pools`, `schedule` and what else `HiSparseConfig` has, as mappings of fields;
            ``policy.hot_rows`` is twice the top-k unless it is given.

    Raises ConfigError that names field, value and fix.
    """
    top_k = int(model.config.index_topk)  # type: ignore[union-attr, arg-type]
    policy: Mapping[str, Any] = sections.pop("policy", {})
    chosen = {"top_k": top_k, "hot_rows": HOT_ROWS_PER_TOP_K * top_k, **policy}
    return checked_config({"layout": layout_of(model).model_dump(), "policy": chosen, **sections})
