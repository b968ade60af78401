"""Tiny models: seeded, and of the kinds that are supported."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

from hisparse.errors import UsageError  # noqa: E402
from hisparse.integrations.transformers.latent import attention_modules  # noqa: E402
from hisparse.integrations.transformers.tiny import MODEL_TYPES, tiny_model  # noqa: E402


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_weights_are_a_function_of_the_seed(model_type):
    one, same, other = (tiny_model(model_type, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all((one[name] == same[name]).all() for name in one)
    assert (one["lm_head.weight"] != other["lm_head.weight"]).any()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_layer_has_latent_attention_with_sixteen_index_heads(model_type):
    model = tiny_model(model_type, layers=3)
    assert sorted(attention_modules(model)) == [0, 1, 2]
    assert model.config.index_n_heads == 16


def test_a_model_without_an_indexer_is_refused_by_name():
    llama = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    with pytest.raises(UsageError, match=r"LlamaForCausalLM .*deepseek_v32"):
        attention_modules(transformers.AutoModelForCausalLM.from_config(llama))
    with pytest.raises(UsageError, match="model_type='llama': use one of deepseek_v32"):
        tiny_model("llama")
