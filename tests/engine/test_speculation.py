"""Speculation end to end: whatever is proposed, tokens and logits are those without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from late_faults import fail_copies
from serving_rig import LONGEST, assert_identical, prompt, serve

from hisparse.device.rows import StepRows
from hisparse.engine.builtin import DRAFT_LAYER, EOS, BuiltinModel
from hisparse.engine.options import RunConfig
from hisparse.engine.reference import DenseCache, reference_decode_many
from hisparse.engine.run import Job
from hisparse.engine.speculate import standing
from hisparse.engine.trace import WorkloadRequest
from hisparse.fsm.machines import RequestState

SPEC = 3


@pytest.fixture(scope="module")
def model():
    return BuiltinModel(seed=11, top_k=16, max_model_len=LONGEST + SPEC, draft=True)


CROWD = [WorkloadRequest(f"q{i}", 0.0, prompt(i, 40 + 9 * i), 20) for i in range(5)]


@pytest.fixture(scope="module")
def expected(model):
    """By the model without a draft head, alone and all resident."""
    plain = BuiltinModel(seed=11, top_k=16, max_model_len=LONGEST)
    found = reference_decode_many(
        plain, [work.prompt for work in CROWD], [work.max_new for work in CROWD], chunk=32
    )
    return {work.request: result for work, result in zip(CROWD, found, strict=True)}


class Drafts:
    """A draft head that knows the answer, and gives it with a mistake from place `wrong` on."""

    def __init__(self, model, expected, wrong):
        self.model, self.expected, self.wrong = model, expected, wrong

    def __getattr__(self, name):
        return getattr(self.model, name)

    def told(self, engine):
        self.engine = engine

    def propose(self, tokens, rows, kv, count):
        found = []
        for row, position in zip(rows.rows.tolist(), rows.positions.tolist(), strict=True):
            name = self.engine.coordinator.state.request_of(row).request
            work = next(work for work in CROWD if work.request == name)
            told = self.expected[name].tokens[position - len(work.prompt) + 1 :][:count]
            told += [0] * (count - len(told))
            found.append([t if i < self.wrong else (t + 1) % EOS for i, t in enumerate(told)])
        return torch.tensor(found)


@pytest.mark.parametrize("wrong", [0, 1, SPEC])
def test_tokens_and_logits_are_those_without_drafts_however_good_these_are(model, expected, wrong):
    engine, replica = serve(Drafts(model, expected, wrong), CROWD, spec=SPEC)
    assert_identical(engine, expected)
    rate, counts = engine.acceptance.rate, replica.coordinator.metrics.counts
    assert rate == 1.0 if wrong == SPEC else rate < 0.5
    assert (rate > 0) == (wrong > 0)
    assert counts["rows_computed"] == sum(len(r.tokens) - 1 for r in engine.done)
    assert counts["spills"] > 0 and replica.worker.statistics()["host_rows"] > 0


def test_the_draft_head_is_right_now_and_then(model, expected):
    engine, _ = serve(model, CROWD, spec=SPEC)
    assert_identical(engine, expected)
    assert 0.05 < engine.acceptance.rate < 0.95 and engine.acceptance.proposed > 100


def test_verification_rows_share_a_hot_region_that_holds_one_selection(model, expected):
    engine, replica = serve(model, CROWD, spec=SPEC, hot_rows=16)
    assert_identical(engine, expected)
    assert replica.worker.statistics()["host_rows"] > 0


class Preempting:
    """Preempts each request once, in decode, while drafts of it wait to be verified."""

    def __init__(self):
        self.names = set()

    def __call__(self, engine):
        for served in list(engine.live.values()):
            state = engine.coordinator.state.requests[served.key].state
            due = len(served.generated) > 4 and served.drafts and served.request not in self.names
            if state is RequestState.DECODE and due:
                self.names.add(served.request)
                engine.preempt(served)


def test_preempted_requests_go_on_as_the_oracle_does(model, expected):
    preempting = Preempting()
    engine, replica = serve(model, CROWD, spec=SPEC, after_step=preempting)
    assert len(preempting.names) >= 3
    assert replica.coordinator.metrics.counts["prefix_hit_pages"] > 0
    assert_identical(engine, expected)


def test_requests_that_a_failed_copy_takes_back_go_on_as_the_oracle_does(
    model, expected, monkeypatch
):
    failed = fail_copies(monkeypatch, lambda transfer: transfer.transfer % 9 == 4, steps=2)
    engine, replica = serve(model, CROWD, spec=SPEC, write_back="on_pressure")
    assert replica.coordinator.metrics.counts["rewinds"] > 1 and len(failed) > 1
    assert_identical(engine, expected)


def test_a_shared_prefix_ends_in_the_same_tokens(model, expected):
    late = [WorkloadRequest(w.request, w.arrival_ms + 1e5, w.prompt, w.max_new) for w in CROWD]
    twice = [*CROWD, *late]
    engine, replica = serve(model, twice, spec=SPEC)
    assert replica.coordinator.metrics.counts["prefix_hit_pages"] > 20
    assert_identical(engine, expected)


def test_a_proposal_leaves_no_trace_in_the_cache(model):
    cache = DenseCache(model.layout)
    tokens = prompt(3, 30)
    step = StepRows(np.zeros(30, dtype=np.int32), np.arange(30))
    cache.begin(step)
    logits = model.forward(tokens, step, cache)
    before = cache.rows(0, 30).tobytes()
    newest = model.choose(logits[-1:]).numpy()
    where = StepRows(np.zeros(1, dtype=np.int32), np.array([30]))
    first = model.propose(newest, where, cache, 4)
    assert first.shape == (1, 4) and cache.rows(0, 30).tobytes() == before
    assert np.array_equal(model.propose(newest, where, cache, 4), first)


def test_a_proposal_depends_on_no_one_else_in_the_step(model):
    lengths, cache = (20, 33, 9), DenseCache(model.layout)
    tokens = np.concatenate([prompt(i, n) for i, n in enumerate(lengths)])
    rows = np.repeat(np.arange(3, dtype=np.int32), lengths)
    step = StepRows(rows, np.concatenate([np.arange(n) for n in lengths]))
    cache.begin(step)
    model.forward(tokens, step, cache)
    newest, at = np.array([7, 8, 9]), np.array(lengths)
    together = model.propose(newest, StepRows(np.arange(3, dtype=np.int32), at), cache, SPEC)
    for i in range(3):
        alone = StepRows(np.array([i], dtype=np.int32), at[i : i + 1])
        assert np.array_equal(model.propose(newest[i : i + 1], alone, cache, SPEC)[0], together[i])


def test_draft_rows_are_a_layer_of_their_own_and_change_no_logit(model):
    plain = BuiltinModel(seed=11, top_k=16, max_model_len=LONGEST)
    tokens, step = prompt(4, 40), StepRows(np.zeros(40, dtype=np.int32), np.arange(40))
    caches = {each: DenseCache(each.layout) for each in (model, plain)}
    for cache in caches.values():
        cache.begin(step)
    logits = [each.forward(tokens, step, cache).numpy().tobytes() for each, cache in caches.items()]
    assert logits[0] == logits[1]
    rows = caches[model].rows(0, 40)
    assert rows.shape[0] == DRAFT_LAYER + 1 and rows[DRAFT_LAYER].any()
    assert all((rows[DRAFT_LAYER] != rows[layer]).any() for layer in range(DRAFT_LAYER))


@pytest.mark.parametrize(
    ("drafts", "chosen", "count"),
    [
        ([], [7], 1),
        ([5, 6], [5, 6, 7], 3),
        ([5, 6], [5, 9, 7], 2),
        ([5, 6], [9, 6, 7], 1),
        ([EOS, 6], [EOS, 6, 7], 1),
    ],
)
def test_what_stands_ends_at_the_first_mistake_and_at_eos(drafts, chosen, count):
    assert standing(drafts, chosen, EOS) == count


def test_a_run_reports_what_was_accepted():
    options = {"requests": 6, "scale": 0.01, "page_size": 4, "top_k": 8, "hot_rows": 8}
    reports = [Job(RunConfig(spec=spec, **options)).run() for spec in (0, 2)]
    assert reports[0]["acceptance_rate"] == 0.0 and reports[0]["drafts_proposed"] == 0
    assert 0 < reports[1]["drafts_accepted"] < reports[1]["drafts_proposed"]
    assert all(r["tokens_identical"] and not r["invariants"]["violations"] for r in reports)
    assert reports[0]["rows_computed"] == reports[1]["rows_computed"]
