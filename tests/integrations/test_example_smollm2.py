"""`examples/smollm2.py` with a tiny model of the same kind in place of the one that is downloaded:
over all positions the answer is the dense one; over some, what is read is what was written."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2.py"
PROMPT, NEW = 200, 12


class Words:
    """Stands for the tokenizer: a token is its number."""

    def decode(self, tokens, **_):
        return " ".join(map(str, tokens))


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_smollm2", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    transformers.AttentionInterface.register(module.ATTENTION, module.hook)
    return module


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        eos_token_id=127,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def asked(example, model):
    prompt = [(7 * i * i + 3 * i) % 126 for i in range(PROMPT)]
    return prompt, example.dense_answer(model, prompt, NEW)


def told(capsys, name):
    return int(re.search(rf"{name} (\d+)", capsys.readouterr().out)[1])


def test_with_all_positions_the_answer_is_that_of_dense_attention(example, model, asked, capsys):
    prompt, dense = asked
    assert example.compare(model, Words(), prompt, 256, dense)
    assert f"yes, all {NEW} tokens" in capsys.readouterr().out


def test_with_few_positions_rows_come_from_the_host(example, model, asked, capsys):
    prompt, dense = asked
    example.compare(model, Words(), prompt, 16, dense)
    assert told(capsys, "host_rows") > 0


def test_a_row_that_is_not_what_was_written_is_found(example, model, asked, monkeypatch):
    resolve = example.HiSparseBackend.resolve

    def spoilt(self, layer, top_k):
        rows = resolve(self, layer, top_k).clone()
        rows[0, 5, 7] ^= 1
        return rows

    monkeypatch.setattr(example.HiSparseBackend, "resolve", spoilt)
    prompt, dense = asked
    with pytest.raises(AssertionError):
        example.compare(model, Words(), prompt, 16, dense)
