"""A05: the slot of the last sampled token, or of a rejected draft, is published like a row.

Here a page is sealed, copied and published by rows that were computed *and accepted*; a sampled
token has no row before it is fed, and a rejected draft's row is never accepted.
"""

from __future__ import annotations

import numpy as np
from kv_rig import PAGE, SchedulerRig, make_config
from serving_rig import LONGEST, events_of, prompt, serve
from serving_rig import PAGE as ROWS

from hisparse.engine.builtin import BuiltinModel
from hisparse.engine.reference import reference_decode
from hisparse.engine.trace import WorkloadRequest
from hisparse.fsm import events as ev

SPEC = 3


def test_a_page_whose_last_row_is_a_rejected_draft_is_neither_copied_nor_found():
    rig = SchedulerRig(make_config(blocks=40))
    key = rig.arrive("q", [1, 2], new=2)
    rig.step()
    row = rig.row(key)
    assert rig.coordinator.grow([row], [2]) == [2]
    step = rig.coordinator.plan_step([row], [2])  # the newest token, and a draft behind it
    rig.send()
    rig.coordinator.rows_computed(step, [row], [1])
    assert rig.state.rows.computed[row] == PAGE - 1
    rig.finish(key)
    for _ in range(3):
        rig.step()
    assert not rig.events(ev.TransferPinned) and not rig.events(ev.PagesPublished)
    again = rig.arrive("again", [1, 2, 1002, 1003, 5], new=2)
    rig.step()
    assert rig.state.requests[again].hit_tokens == 0


class WrongDrafts:
    """The model with another EOS, and drafts of it that never stand."""

    def __init__(self, model, eos):
        self.model, self.eos = model, eos

    def __getattr__(self, name):
        return getattr(self.model, name)

    def propose(self, tokens, rows, kv, count):
        drafts = self.model.propose(tokens, rows, kv, count)
        return ((drafts + 1) % 300).masked_fill(drafts == self.eos, 0)


def test_who_continues_behind_it_reads_its_own_row():
    """A request ends by EOS on a page boundary, with the KV of a rejected draft in the last slot;
    the next one has the same tokens and goes on."""
    model = BuiltinModel(seed=11, top_k=16, max_model_len=LONGEST + SPEC, draft=True)
    for length in range(33, 60):
        first = prompt(length, length)
        tokens = reference_decode(model, first, 12, chunk=32).tokens
        ends = [
            i for i, t in enumerate(tokens) if t not in tokens[:i] and (length + i + 1) % ROWS == 0
        ]
        if ends and 2 < ends[0] < 9:
            break
    spoken = tokens[: ends[0] + 1]
    second = np.concatenate([first, spoken, prompt(7, 3)])
    want = reference_decode(model, second, 5, chunk=32)
    work = [WorkloadRequest("first", 0.0, first, 12), WorkloadRequest("second", 1e5, second, 5)]
    engine, replica = serve(WrongDrafts(model, spoken[-1]), work, spec=SPEC)
    served = {each.request: each for each in engine.done}
    assert served["first"].generated == spoken and engine.acceptance.proposed > 6
    planned = [e for e in events_of(replica, ev.StepPlanned) if e.rows == (0,)]
    whole = length + len(spoken)
    assert any(e.starts[0] < whole <= e.starts[0] + e.counts[0] for e in planned), "slot written"
    hits = [e.hit_tokens for e in events_of(replica, ev.RequestAdmitted)]
    assert hits == [0, whole - ROWS]
    n = len(served["second"].generated)
    assert served["second"].generated == want.tokens[:n]
    assert np.stack(served["second"].logits).tobytes() == want.logits[:n].tobytes()
