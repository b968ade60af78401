"""Decode steps of fixed shape: the bits of the steps that take a batch as it comes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from serving_rig import LONGEST, assert_identical, prompt, serve

from hisparse.config import HiSparseConfig
from hisparse.device import open_device
from hisparse.device.rows import StepRows
from hisparse.device.worker import HiSparseWorker
from hisparse.engine.builtin import EOS, BuiltinModel
from hisparse.engine.fixed import FixedDecode, newest_fixed
from hisparse.engine.reference import reference_decode_many
from hisparse.engine.speculate import newest_tokens
from hisparse.engine.tiered import TieredCache
from hisparse.engine.trace import WorkloadRequest
from hisparse.errors import ConfigError

CROWD = [WorkloadRequest(f"q{i}", 0.0, prompt(i, 40 + 9 * i), 20) for i in range(5)]


def decoder(spec):
    return BuiltinModel(seed=11, top_k=16, max_model_len=LONGEST + spec, draft=spec > 0)


@pytest.fixture(scope="module")
def expected():
    found = reference_decode_many(
        decoder(0), [work.prompt for work in CROWD], [work.max_new for work in CROWD], chunk=32
    )
    return {work.request: result for work, result in zip(CROWD, found, strict=True)}


@pytest.mark.parametrize(("spec", "shapes"), [(0, {1}), (1, {1, 2}), (3, {1, 4})])
def test_tokens_and_logits_are_the_oracles(expected, spec, shapes):
    engine, replica = serve(decoder(spec), CROWD, spec=spec, fixed=True, hot_rows=64)
    assert_identical(engine, expected)
    counts = replica.coordinator.metrics.counts
    assert counts["spills"] > 0 and replica.worker.statistics()["host_rows"] > 0
    assert engine.runner.steps["fixed"] > 20 and engine.runner.steps["eager"] > 0
    made = engine.runner.fixed.shapes
    assert {span for _, span in made} == shapes and {n for n, _ in made} <= {1, 2, 4, 8}


def test_drafts_are_those_of_steps_that_take_a_batch_as_it_comes(expected):
    taken = []
    for fixed in (False, True):
        engine, _ = serve(decoder(3), CROWD, spec=3, fixed=fixed, hot_rows=64)
        taken.append((engine.acceptance, [(s.request, s.tokens) for s in engine.done]))
    assert taken[0] == taken[1] and taken[0][0].accepted > 0


def test_what_stands_is_found_on_the_device_as_on_the_host():
    random = np.random.RandomState(5)
    for _ in range(200):
        span, requests = random.randint(1, 5), random.randint(1, 5)
        counts = random.randint(1, span + 1, size=requests)
        lines = [(i, j) for i in range(requests) for j in range(counts[i])]
        given = random.choice([7, 8, EOS], size=(requests, span))
        chosen = random.choice([7, 8, EOS], size=(requests, span))
        first = random.randint(0, 50, size=requests)
        at = [np.array(values) for values in zip(*lines, strict=True)]
        host = StepRows(at[0].astype(np.int32) + 3, first[at[0]] + at[1])
        want, places = newest_tokens(
            given[tuple(at)], host, np.arange(len(lines)), chosen[tuple(at)], EOS
        )
        rows = np.full((requests, span), -1, dtype=np.int32)
        rows[tuple(at)] = host.rows
        positions = first[:, None] + np.arange(span)
        fixed = StepRows(*(torch.tensor(a).flatten() for a in (rows, positions)), span)
        flat = [torch.tensor(a).flatten() for a in (given, chosen)]
        got, where = newest_fixed(flat[0], fixed, flat[1], EOS)
        real = where.rows >= 0
        assert got[real].tolist() == want.tolist()
        assert where.rows[real].tolist() == places.rows.tolist()
        assert where.positions[real].tolist() == places.positions.tolist()


def test_a_batch_gets_the_least_shape_that_holds_it_or_none():
    model = decoder(1)
    config = HiSparseConfig.model_validate(
        {
            "layout": model.layout,
            "pools": {"page_size": 8, "gpu_blocks": 40, "host_pool_gib": 0.01},
            "policy": {"top_k": 16, "hot_rows": 32},
            "schedule": {"max_model_len": 100, "step_rows": 13, "max_requests": 11},
        }
    )
    worker = HiSparseWorker(config, open_device("cpu"))
    decode = FixedDecode(config, model, TieredCache(worker), spec=1)

    def shape(*counts, sampled=None):
        rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        n = len(rows) if sampled is None else sampled
        step = decode.prepare(StepRows(rows, np.arange(len(rows))), np.arange(n))
        return step and (step.requests, step.span)

    assert [shape(*[1] * n) for n in (1, 2, 3, 8, 9)] == [(1, 1), (2, 1), (4, 1), (8, 1), (11, 1)]
    assert shape(2) == (1, 2) and shape(1, 2, 1) == (4, 2) and shape(*[2] * 6) == (6, 2)
    assert shape(*[1] * 6, 2) is None  # seven requests of two lines are more than a step's rows
    assert shape(5, 1, sampled=2) is None and shape() is None  # prompt rows; nothing
    assert shape(1) == (1, 1) and len(decode.shapes) == 8


@pytest.mark.parametrize(
    ("spec", "says"), [(2, r"hot_rows=47.* at least 48"), (32, "spec=32.* at most 31 drafts")]
)
def test_drafts_that_no_step_of_fixed_shape_takes_are_refused_with_what_would_do(spec, says):
    model = decoder(spec)
    config = HiSparseConfig.model_validate(
        {
            "layout": model.layout,
            "pools": {"page_size": 8, "gpu_blocks": 40, "host_pool_gib": 0.01},
            "policy": {"top_k": 16, "hot_rows": 47},
            "schedule": {"max_model_len": 100},
        }
    )
    cache = TieredCache(HiSparseWorker(config, open_device("cpu")))
    with pytest.raises(ConfigError, match=says):
        FixedDecode(config, model, cache, spec=spec)


def test_padding_lines_leave_no_trace(expected):
    """The content check sees every row that a step reads; lines of nobody read none."""
    seen = []
    engine, _ = serve(decoder(0), CROWD[:3], fixed=True, check=lambda *call: seen.append(call))
    assert_identical(engine, expected)
    assert all((rows.rows >= 0).all() for _, rows, _, _ in seen)
    assert all(len(rows.rows) == len(top_k) == len(data) for _, rows, top_k, data in seen)
    assert (4, 1) in engine.runner.fixed.shapes and 3 in {len(rows.rows) for _, rows, _, _ in seen}
