"""What `generate` over the tiers refuses: with the reason, and with nothing changed by it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from generate_rig import config, generate, over, prompts, tiers  # noqa: E402

import hisparse  # noqa: E402
from hisparse.errors import CapacityError, DeviceError, UsageError  # noqa: E402
from hisparse.integrations.transformers import HiSparseCache, attach, detach  # noqa: E402
from hisparse.integrations.transformers.tiny import tiny_model  # noqa: E402
from hisparse.integrations.transformers.versions import require  # noqa: E402

NEW = 6


@pytest.fixture
def model():
    return tiny_model("glm_moe_dsa", seed=1, layers=2)


@pytest.fixture
def roomy(model):
    """A backend with places for everything, and in the end a batch that is served by it."""
    ids, mask = prompts(lines=2)
    want = generate(model, None, ids, mask, NEW)[0]
    with tiers(model, gpu_blocks=200, policy={"watermark_blocks": 0}) as backend:
        yield backend
        assert not backend.requests
        assert torch.equal(over(model, backend, ids, mask, NEW)[0], want)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_beams": 2}, "beams share rows that a request owns alone"),
        ({"prompt_lookup_num_tokens": 3}, "rows that were accepted stay|cache that can be cropped"),
    ],
)
def test_ways_to_generate_that_would_fork_or_take_back_rows(model, roomy, options, why):
    ids, mask = prompts(lines=1, width=20)
    with pytest.raises((UsageError, ValueError), match=why):
        over(model, roomy, ids, mask, NEW, **options)


@pytest.mark.parametrize("holes", [slice(-3, None), slice(5, 9)])
def test_padding_anywhere_but_on_the_left(model, roomy, holes):
    ids, mask = prompts(lines=2)
    mask[0, holes] = 0
    with pytest.raises(UsageError, match="line 0 has padding behind a token: pad on the left"):
        over(model, roomy, ids, mask, NEW)


def test_more_tokens_than_a_step_may_have_names_the_chunk_that_would_do(model, roomy):
    ids, mask = prompts(lines=1, width=80)
    with pytest.raises(UsageError, match=r"80 tokens, .*step_rows is 72: .*prefill_chunk_size=72"):
        over(model, roomy, ids, mask * 0 + 1, 3)
    over(model, roomy, ids, mask * 0 + 1, 3, prefill_chunk_size=72)


def test_a_batch_without_room_names_the_pool(model):
    ids, mask = prompts()
    with tiers(model, gpu_blocks=30) as backend:
        with pytest.raises(CapacityError, match=r"no place for generate-1: .*gpu_blocks"):
            over(model, backend, ids, mask, NEW)
        assert not backend.requests
        with pytest.raises(CapacityError, match="max_model_len"):
            HiSparseCache(model, backend, max_tokens=1000).begin(ids, mask)


def test_an_attached_model_needs_this_cache_until_it_is_detached(model):
    ids, mask = prompts(lines=1)
    want = generate(model, None, ids, mask, NEW)[0]
    attach(model)
    with pytest.raises(UsageError, match=r"called with DynamicCache: .*or detach\(model\)"):
        model.generate(ids, attention_mask=mask, max_new_tokens=NEW)
    detach(model)
    assert torch.equal(generate(model, None, ids, mask, NEW)[0], want)


def test_tokens_are_needed_and_a_backend_of_this_model(model, roomy):
    with HiSparseCache(model, roomy) as cache, pytest.raises(UsageError, match="pass input_ids"):
        model(inputs_embeds=torch.zeros(1, 4, 64), past_key_values=cache)
    other = tiny_model("deepseek_v32", layers=2)
    with pytest.raises(UsageError, match=r"configure it by config_of\(model"):
        HiSparseCache(other, roomy)


def test_model_and_backend_in_each_others_place_are_told(model, roomy):
    with pytest.raises(UsageError, match=r"HiSparseBackend is no model of transformers: pass one"):
        HiSparseCache(roomy, model)
    with pytest.raises(UsageError, match="Linear is no model of transformers"):
        HiSparseCache(torch.nn.Linear(2, 2), roomy)
    with pytest.raises(UsageError, match="NoneType is no HiSparseBackend"):
        HiSparseCache(model, None)


@pytest.mark.parametrize("lines", [0, 1])
def test_a_batch_without_a_token_is_refused(model, roomy, lines):
    with HiSparseCache(model, roomy) as cache:
        ids = torch.zeros(lines, lines - 1 if lines else 5, dtype=torch.long)
        with pytest.raises(UsageError, match=f"of {lines} lines without a token"):
            model(ids, attention_mask=torch.ones_like(ids), past_key_values=cache)


def test_more_tokens_than_were_promised_name_both_numbers(model, roomy):
    ids, mask = prompts(lines=2)
    said = pytest.raises(UsageError, match=r"max_tokens=44: pass generate\(\) a smaller max_new_")
    with HiSparseCache(model, roomy, max_tokens=44) as cache, said:
        generate(model, cache, ids, mask, 9)


def test_a_pass_that_fails_changes_no_row(model, roomy):
    ids = prompts(lines=2, width=30)[0].clamp(min=2)
    mask = torch.ones_like(ids)
    want = over(model, roomy, ids, mask, NEW)[0]
    failing = [True]

    def fail(*_):
        if failing and failing.pop():
            raise RuntimeError("out of luck")

    with HiSparseCache(model, roomy, name="again") as cache:
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            generate(model, cache, ids, mask, NEW)
        assert cache.columns == 0 and not roomy.requests
        first = model(ids, attention_mask=mask, past_key_values=cache)
        failing.append(True)
        held = torch.cat([mask, mask[:, -1:]], 1)
        token = first.logits[:, -1:].argmax(-1)
        with pytest.raises(RuntimeError, match="out of luck"):
            model(token, attention_mask=held, past_key_values=cache)
        hook.remove()
        later = generate(model, cache, torch.cat([ids, token], 1), held, NEW - 1)[0]
        assert torch.equal(torch.cat([token, later], 1), want)


@pytest.mark.parametrize("answer", ["rewind", "fail"])
def test_a_copy_that_failed_under_tokens_is_told(model, answer):
    ids, mask = prompts()
    made = config(model, policy={"on_copy_failure": answer})
    with hisparse.HiSparseBackend(made, copy_fault=lambda t: t.transfer == 9) as backend:
        cache = HiSparseCache(model, backend)
        with pytest.raises(DeviceError, match="a copy failed under generate-"):
            generate(model, cache, ids, mask, 30)
            cache.settle()
        cache.close()
        assert not backend.requests
        over(model, backend, ids[:2], mask[:2], NEW)


def test_without_transformers_the_extra_is_named(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("hisparse.integrations.transformers.versions.version", missing)
    with pytest.raises(UsageError, match=r"hisparse\[transformers\].*transformers>=5.17"):
        require()


@pytest.mark.parametrize("version", ["5.16.2", "4.57.0"])
def test_an_older_version_is_refused_by_name(monkeypatch, version):
    monkeypatch.setattr("hisparse.integrations.transformers.versions.version", lambda _: version)
    with pytest.raises(UsageError, match=rf"transformers {version} is too old: pip install"):
        require()
