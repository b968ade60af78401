"""Tiny models of the supported kinds, from their own config classes, with seeded random weights.

No download: for tests, demonstrations and the fuzzing of an engine. Every inner dimension is a
multiple of 16. There are 16 index heads: scores of an indexer are sums of rectified ones, and with
two heads, or four, so many are exactly zero that ties decide, by the shape of the call.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hisparse.errors import UsageError

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2")
VOCAB, EOS = 512, 0


def tiny_model(
    model_type: str,
    *,
    seed: int = 0,
    top_k: int = 8,
    max_model_len: int = 512,
    layers: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> PreTrainedModel:
    """A model for evaluation, with eager attention; its weights are a function of `seed`.

    Args:
        model_type: one of MODEL_TYPES.
        top_k: rows that a token attends to.
        max_model_len: positions that it is made for.
        layers: decoder layers; where the kind shares selections, every second one follows.

    Raises UsageError for another model type.
    """
    if model_type not in MODEL_TYPES:
        raise UsageError(f"model_type={model_type!r}: use one of {', '.join(MODEL_TYPES)}")
    config = CONFIG_MAPPING[model_type](**_fields(model_type, top_k, max_model_len, layers))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = EOS
    return model.to(device).eval()


def _fields(model_type: str, top_k: int, max_model_len: int, layers: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "hidden_act": "silu",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "q_lora_rank": 32,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": top_k,
        "max_position_embeddings": max_model_len,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    }
    if model_type == "axk2":
        fields |= {"n_group": None, "topk_group": None}
    if model_type in ("glm_moe_dsa", "hy_v4"):
        fields["indexer_types"] = ["full" if i % 2 == 0 else "shared" for i in range(layers)]
    return fields
