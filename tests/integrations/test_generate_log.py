"""A conversation through `generate` is a run like any other: logged, checked, replayed."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from click.testing import CliRunner
from generate_rig import generate, over, prompts, tiers

from hisparse.cli import cli
from hisparse.integrations.transformers import HiSparseCache
from hisparse.integrations.transformers.tiny import MODEL_TYPES, tiny_model


def test_turns_that_share_a_prefix_are_checked_and_replayed_from_their_log(tmp_path):
    """Two conversations of three turns, a cache and a request each: every later turn finds what the
    one before left, also where the other conversation took its place on the GPU."""
    model = tiny_model("glm_moe_dsa", seed=1)
    talks = [prompts(seed, lines=1)[0] for seed in (3, 4)]
    room = {"max_requests": 1, "gpu_blocks": 38, "policy": {"watermark_blocks": 0}}
    with tiers(model, log=tmp_path / "log", step_rows=84, **room) as backend:
        for turn in range(3):
            for talk, ids in enumerate(talks):
                mask = torch.ones_like(ids)
                want, of_eager = generate(model, None, ids, mask, 12)
                with HiSparseCache(model, backend, name=f"talk-{talk}-{turn}") as cache:
                    said, logits = generate(model, cache, ids, mask, 12)
                    cache.settle()
                assert torch.equal(said, want) and torch.allclose(logits, of_eager, atol=1e-3)
                talks[talk] = torch.cat([ids, said], 1)
    counts, live = backend.coordinator.metrics.counts, backend.coordinator.digest()
    assert counts["prefix_hit_pages"] > 40 and counts["restores"] > 5

    log_answers(tmp_path / "log", live)


@pytest.mark.parametrize("kind", [kind for kind in MODEL_TYPES if kind != "glm_moe_dsa"])
def test_a_padded_batch_of_each_other_kind_is_checked_and_replayed_from_its_log(kind, tmp_path):
    model, (ids, mask) = tiny_model(kind, seed=1), prompts()
    with tiers(model, log=tmp_path / "log") as backend:
        over(model, backend, ids, mask, 16, eos_token_id=-1)
    assert backend.coordinator.metrics.counts["spills"] > 5
    log_answers(tmp_path / "log", backend.coordinator.digest())


def log_answers(log, live):
    """`check` finds nothing in it, and `replay` ends at the digest of the live state."""
    for verb in ("check", "replay"):
        done = CliRunner().invoke(cli, [verb, str(log)])
        assert done.exit_code == 0, (verb, done.output)
    assert live in done.output
