"""Latent rows: an attention module hands its compressed KV on, and the reader of rows expands it.

transformers 5.17 expands the latents of every token to keys and values of all heads and caches
those; later versions cache the latents and expand all that the cache holds. `pass_latents` makes
both hand on latents alone, in the order that a row has::

    row   c_kv: kv_lora_rank | k_rot: qk_rope_head_dim       of the model's dtype
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hisparse.errors import UsageError


def attention_modules(model: nn.Module) -> dict[int, Any]:
    """The modules that compress KV and select rows of it, by layer.

    Raises UsageError for a model that has none, or layers without one.
    """
    if not hasattr(model, "modules") or not hasattr(model, "config"):
        raise UsageError(
            f"a {type(model).__name__} is no model of transformers: pass one, and the backend "
            "behind it"
        )
    found = dict(_attention_modules(model))
    if sorted(found) != list(range(len(found))) or len(found) != _layers(model):
        raise UsageError(
            f"{type(model).__name__} has {_layers(model)} layers and latent attention with an "
            f"indexer in {sorted(found)}: a model with both in every layer is needed "
            "(deepseek_v32, glm_moe_dsa, hy_v4, axk2)"
        )
    return found


def _attention_modules(model: nn.Module) -> Iterator[tuple[int, Any]]:
    for module in model.modules():
        if hasattr(module, "expand_kv") and hasattr(module, "indexer"):
            yield int(module.layer_idx), module  # type: ignore[arg-type]


def _layers(model: nn.Module) -> int:
    return int(model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]


def pass_latents(model: nn.Module) -> None:
    """From now on the attention modules hand latents on; again, this changes nothing."""
    for module in attention_modules(model).values():
        module.expand_kv = _unexpanded


def expand_again(model: nn.Module) -> None:
    """Undo `pass_latents`."""
    for module in attention_modules(model).values():
        module.__dict__.pop("expand_kv", None)


def expand(module: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of latent rows, as the module's class makes them.

    Args:
        rows: [n, k, kv_lora_rank + qk_rope_head_dim].

    Returns:
        [n, heads, k, qk_head_dim] and [n, heads, k, v_head_dim].
    """
    latent = int(module.kv_lora_rank)
    of_class = type(module).expand_kv
    keys, values = of_class(module, rows[:, None, :, :latent], rows[:, None, :, latent:])
    return keys, values


def _unexpanded(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latents, rotated
