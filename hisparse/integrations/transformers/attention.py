"""The attention and mask functions that transformers calls, and what a model is changed by.

`attach` gives a model the implementation ``hisparse``: latents are handed on (`latent`), the rows
that the indexer selected come from the cache, and each pass of the model is one step of it. Every
query reads its own selection, in prefill too: nothing but the selected rows is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from hisparse.errors import UsageError
from hisparse.integrations.transformers.cache import HiSparseCache
from hisparse.integrations.transformers.latent import (
    attention_modules,
    expand,
    expand_again,
    pass_latents,
)
from hisparse.integrations.transformers.layer import HiSparseLayer

NAME = "hisparse"
EXPANDED_VALUES_MAX = 1 << 26  # keys and values that are expanded at once
_CACHES = ("cache", "past_key_values")  # what a model calls it, by version


def attach(model: Any) -> None:
    """Make `model` attend through a `HiSparseCache`, which every call then needs.

    Again, this changes nothing. Raises UsageError for a model without latent attention and an
    indexer in every layer.
    """
    if hasattr(model, "_hisparse_attached"):
        return
    attention_modules(model)
    AttentionInterface.register(NAME, hisparse_attention_forward)
    AttentionMaskInterface.register(NAME, eager_mask)  # the indexer needs it, added to its scores
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    pass_latents(model)
    inner = model.base_model
    hooks = (
        inner.register_forward_pre_hook(_begin, with_kwargs=True),
        inner.register_forward_hook(_end, with_kwargs=True, always_call=True),
    )
    model._hisparse_attached = (before, hooks)


def detach(model: Any) -> None:
    """Give `model` back the attention that it had before `attach`."""
    if not hasattr(model, "_hisparse_attached"):
        return
    before, hooks = model._hisparse_attached
    del model._hisparse_attached
    for hook in hooks:
        hook.remove()
    expand_again(model)
    model.set_attn_implementation(before)


def _cache_of(kwargs: dict[str, Any]) -> HiSparseCache:
    cache = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
    if not isinstance(cache, HiSparseCache):
        raise UsageError(
            f"the model is attached to hisparse and was called with {type(cache).__name__}: pass "
            "past_key_values=HiSparseCache(...), or detach(model)"
        )
    return cache


def _begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = _cache_of(kwargs)
    ids = args[0] if args else kwargs.get("input_ids")
    if ids is None:
        raise UsageError("inputs_embeds have no tokens to know a prefix by: pass input_ids")
    mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
    cache.begin(ids, mask)


def _end(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Called after an error too, without an output."""
    cache = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
    if isinstance(cache, HiSparseCache):
        cache.end() if output is not None else cache.abandon()


def hisparse_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    indices: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the rows that the indexer selected.

    Args:
        query: [lines, heads, width, qk_head_dim].
        key: the layer of the cache, which its `update` answered.
        attention_mask: not read: padding and later tokens are known by position.
        indices: columns, int [lines, width, k].
        s_aux: a sink's logit for each head, float32 [heads].

    Returns:
        [lines, width, heads, v_head_dim], zeros at padding, and None.
    """
    if not isinstance(key, HiSparseLayer) or indices is None or dropout:
        raise UsageError(
            "attention 'hisparse' needs a HiSparseCache, the indexer's selection and no dropout: "
            "pass past_key_values=HiSparseCache(...), and call model.eval()"
        )
    lines, heads, width, _ = query.shape
    out = query.new_zeros(lines * width, heads, module.v_head_dim)
    step = key.cache.step
    if step is not None:
        rows, chosen = key.cache.resolve(key.layer, indices)
        queries = query.transpose(1, 2).flatten(0, 1).index_select(0, step.at)
        expanded = rows.shape[1] * heads * (module.qk_head_dim + module.v_head_dim)
        at_once = max(1, EXPANDED_VALUES_MAX // max(1, expanded))
        made = []
        for first in range(0, len(queries), at_once):
            part = slice(first, first + at_once)
            made.append(_attend(module, queries[part], rows[part], chosen[part], scaling, s_aux))
        out.index_copy_(0, step.at, torch.cat(made))
    return out.view(lines, width, heads, -1), None


def _attend(
    module: Any,
    query: torch.Tensor,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[n, heads, v_head_dim] of queries [n, heads, d] over rows [n, k, values] of the selection
    `chosen`, int [n, k]."""
    keys, values = expand(module, rows)
    scores = torch.matmul(query[:, :, None], keys.transpose(2, 3)) * scaling  # [n, heads, 1, k]
    least = torch.finfo(scores.dtype).min
    scores = scores.masked_fill((chosen < 0)[:, None, None], least)
    if sinks is None:
        weights = torch.softmax(scores, -1, dtype=torch.float32)
    else:  # in the type of the logits with their sinks, as hy_v4 does it
        of_heads = sinks.view(1, -1, 1, 1).expand(len(query), -1, -1, -1)
        scores = torch.cat([scores, of_heads], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        weights = torch.softmax(scores, -1)[..., : rows.shape[1]]
    weights = weights.to(values.dtype)
    return torch.matmul(weights, values)[:, :, 0]
