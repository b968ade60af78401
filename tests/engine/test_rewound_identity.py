"""Copies that fail after steps have read their pages, under the real model: requests go back, and
then on to the tokens and logits of the oracle."""

from __future__ import annotations

import pytest
from late_faults import fail_copies
from serving_rig import LONGEST, PAGE, assert_identical, events_of, prompt, serve

from hisparse.device.cpu.resolver import CpuResolver
from hisparse.engine.builtin import BuiltinModel
from hisparse.engine.reference import reference_decode_many
from hisparse.engine.trace import WorkloadRequest
from hisparse.fsm import events as ev
from hisparse.fsm.wire import TransferKind

CROWD = [WorkloadRequest(f"q{i}", 0.0, prompt(i, 40 + 9 * i), 20) for i in range(5)]
COLD = WorkloadRequest("cold", 0.0, prompt(50, 80), 24)
OTHERS = [WorkloadRequest(f"other{i}", 1.0, prompt(60 + i, 90), 20) for i in range(3)]
WARM = WorkloadRequest("warm", 400.0, COLD.prompt, COLD.max_new)


@pytest.fixture(scope="module")
def model():
    return BuiltinModel(seed=11, top_k=16, max_model_len=LONGEST)


@pytest.fixture(scope="module")
def expected(model):
    work = [*CROWD, COLD, *OTHERS, WARM]
    found = reference_decode_many(
        model, [w.prompt for w in work], [w.max_new for w in work], chunk=32
    )
    return {w.request: result for w, result in zip(work, found, strict=True)}


def one_in(n, kind, at=0):
    return lambda transfer: transfer.kind is kind and transfer.transfer % n == at


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_spill_that_fails_steps_after_its_table_entry_was_replaced(
    model, expected, monkeypatch, steps
):
    failed = fail_copies(monkeypatch, one_in(7, TransferKind.SPILL, 3), steps)
    engine, replica = serve(model, CROWD, write_back="on_pressure")
    rewound = events_of(replica, ev.RequestRewound)
    assert rewound and failed and not events_of(replica, ev.RequestAborted)
    assert any(e.rows < e.certain for e in rewound), "a lost page lies before certain rows"
    assert_identical(engine, expected)


def test_a_copy_known_to_have_failed_when_it_is_enqueued_takes_nobody_back(
    model, expected, monkeypatch
):
    failed = fail_copies(monkeypatch, one_in(7, TransferKind.SPILL, 3))
    engine, replica = serve(model, CROWD, write_back="on_pressure")
    assert failed and not events_of(replica, ev.RequestRewound)
    assert_identical(engine, expected)


def test_a_failure_during_prefill(model, expected, monkeypatch):
    fail_copies(monkeypatch, one_in(9, TransferKind.SPILL, 1), steps=2)
    engine, replica = serve(model, CROWD, write_back="on_pressure", chunk=8, gpu_blocks=30)
    prompts = {w.request: len(w.prompt) for w in CROWD}
    early = [e for e in events_of(replica, ev.RequestRewound) if e.certain < prompts[e.request]]
    assert early
    assert_identical(engine, expected)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_failed_restore_of_a_shared_prefix(model, expected, monkeypatch, steps):
    fail_copies(monkeypatch, one_in(2, TransferKind.RESTORE), steps)
    engine, replica = serve(model, [COLD, *OTHERS, WARM], gpu_blocks=40)
    rewound = [e for e in events_of(replica, ev.RequestRewound) if e.request == "warm"]
    hit = [e.hit_tokens for e in events_of(replica, ev.RequestAdmitted) if e.request == "warm"]
    assert rewound and all(e.rows >= hit[0] > 0 for e in rewound), "the hit itself is not lost"
    assert_identical(engine, expected)


def test_hot_rows_of_rows_that_were_taken_back_are_forgotten(model, expected, monkeypatch):
    """A rewound position lives in the hot region: there it must not be found again."""
    forget, stale = CpuResolver.forget_positions, []

    def counting(self, row, first, last):
        stale.append(int((self.hot_map[row, first:last] >= 0).sum()))
        forget(self, row, first, last)

    monkeypatch.setattr(CpuResolver, "forget_positions", counting)
    fail_copies(monkeypatch, one_in(7, TransferKind.SPILL, 3), steps=4)
    engine, _ = serve(model, CROWD, write_back="on_pressure")
    assert max(stale) >= PAGE // 2
    assert_identical(engine, expected)


def test_by_policy_the_request_ends_and_nobody_else_notices(model, expected, monkeypatch):
    fail_copies(monkeypatch, lambda transfer: transfer.transfer == 10, steps=2)
    engine, replica = serve(model, CROWD, write_back="on_pressure", on_copy_failure="fail")
    ended = events_of(replica, ev.RequestAborted)
    assert [e.reason for e in ended] == ["copy failed"]
    assert replica.coordinator.metrics.counts["requests_failed"] == 1
    for served in engine.done:
        want = expected[served.request].tokens
        assert served.generated == want[: len(served.generated)]
        assert (served.outcome == "failed") == (served.request == ended[0].request)
