"""Which events name an id: by machine, in the scheduler's stream and in a rank's."""

from __future__ import annotations

import pytest

from hisparse.fsm import events as ev
from hisparse.fsm.history import last_events, names_id
from hisparse.fsm.machines import BlockRole
from hisparse.fsm.wire import AckKind

RESERVED = ev.BlocksReserved(0, BlockRole.RESIDENT, 2, 0, (5, 6), (1, 1))
READ = ev.MemoryAccessed(0, "d2h", "gpu", False, (5,), 9)
WRITTEN = ev.MemoryAccessed(0, "d2h", "host", True, (7,), 9)
DONE = ev.AckSent(0, 1, int(AckKind.COMPLETED), 9, 1)
RETIRED = ev.AckSent(0, 2, int(AckKind.RETIRED), 9, 0)


@pytest.mark.parametrize(
    ("machine", "ident", "named"),
    [
        ("BlockLease", 5, [RESERVED, READ]),
        ("BlockLease", 7, []),
        ("HostPage", 7, [WRITTEN]),
        ("HostPage", 5, []),
        ("Transfer", 9, [READ, WRITTEN, DONE]),
    ],
)
def test_an_id_is_named_by_the_events_of_its_own_kind(machine, ident, named):
    events = [RESERVED, READ, WRITTEN, DONE, RETIRED]
    assert [e for e in events if names_id(e, machine, ident)] == named


def test_the_last_events_come_oldest_first():
    events = [(1, RESERVED), (2, READ), (3, RESERVED)]
    assert last_events(events, "BlockLease", 5, most=2) == ["2 MemoryAccessed", "3 BlocksReserved"]
