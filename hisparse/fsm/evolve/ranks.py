"""evolve: worker ranks that are lost, and those that join.

PYTEST_DONT_REWRITE (what an assertion says is part of a fault's signature, see `fsm.reduce`)
"""

from __future__ import annotations

from hisparse.fsm import events as ev
from hisparse.fsm.state import State


def rank_lost(state: State, e: ev.RankLost, seq: int) -> None:
    assert 0 <= e.rank < len(state.worker_epoch), f"rank {e.rank} of {len(state.worker_epoch)}"
    assert e.worker_epoch > state.worker_epoch[e.rank], (e, state.worker_epoch)
    state.worker_epoch[e.rank] = e.worker_epoch
    state.acked[e.rank] = 0
    state.retired[e.rank] = state.step  # it reads nothing any more
    state.lost |= 1 << e.rank


def rank_joined(state: State, e: ev.RankJoined, seq: int) -> None:
    assert state.lost >> e.rank & 1, f"rank {e.rank} joins and was not lost"
    assert e.worker_epoch == state.worker_epoch[e.rank] and e.at_seq <= state.seq, e
    assert not state.rows.used.any() and not state.transfers and not state.suffix_copies, (
        "a rank joins while something is held that it does not have"
    )
    assert not state.asleep, "a rank joins pools that have no memory"
    state.lost &= ~(1 << e.rank)
