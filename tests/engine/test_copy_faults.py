"""Failing copies under the real model: who finishes is identical, nothing false is published."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hisparse.device.transfers import TransferQueue
from hisparse.device.worker import HiSparseWorker
from hisparse.engine import run
from hisparse.engine.run import Job, RunConfig
from hisparse.engine.verify import differing_requests
from hisparse.fsm.wire import TransferKind

SMALL = {"requests": 16, "scale": 0.01, "page_size": 4, "top_k": 8, "hot_rows": 8, "step_ms": 5.0}


def served_with_faults(monkeypatch, kinds, rate, seed):
    """The job's served requests and oracle, with a share of the copies of `kinds` failing."""
    rng, failed = random.Random(seed), []
    copy = TransferQueue._copy

    def failing(self, transfer):
        if transfer.kind in kinds and rng.random() < rate:
            failed.append(transfer)
            return False
        return copy(self, transfer)

    monkeypatch.setattr(TransferQueue, "_copy", failing)
    seen = {}

    def keep(expected, served, coordinator, oracle, live):
        seen.update(expected=expected, served=served, worker=live.worker, engine=oracle.engine)
        return {}

    monkeypatch.setattr(run, "verified_figures", keep)
    Job(RunConfig(seed=seed, abort_rate=0.3, **SMALL)).run()
    return seen, failed


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", list(TransferKind))
def test_who_finishes_is_identical(monkeypatch, kind, seed):
    seen, _ = served_with_faults(monkeypatch, {kind}, 0.3, seed)
    finished = [r for r in seen["served"] if r.outcome == "finished"]
    expected = {r.request: seen["expected"][r.request] for r in finished}
    assert not differing_requests(finished, expected)
    for request in seen["served"]:  # nor does anybody else get a token that is not the model's
        want = seen["expected"][request.request].tokens
        assert request.generated == want[: len(request.generated)]


def test_every_published_page_holds_what_the_oracle_computed(monkeypatch):
    closed = HiSparseWorker.shutdown
    monkeypatch.setattr(HiSparseWorker, "shutdown", lambda self: None)
    seen, failed = served_with_faults(monkeypatch, set(TransferKind), 0.2, 1)
    assert failed
    hasher, page = seen["engine"].hasher, SMALL["page_size"]
    pages = seen["engine"].coordinator.state.prefix
    found = 0
    for request in seen["served"]:
        want = seen["expected"][request.request].rows
        for i, name in enumerate(hasher.extend(b"", request.tokens[: want.shape[1]])):
            if name in pages:
                found += 1
                for layer, handle in enumerate(seen["worker"].handles):
                    held = handle.runtime.host.array[pages[name]]
                    assert np.array_equal(held, want[layer, i * page : (i + 1) * page])
    assert found > 20
    closed(seen["worker"])
