"""The model for Spin and the production code, on one projection: as many states, the same verdict,
also when an entry of a table is another.

Needs Spin and a C compiler (Debian: `apt-get install spin gcc`). Without them these tests are
skipped, unless HISPARSE_SPIN=required, as in CI: then they fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import contextmanager
from unittest import mock

import pytest

from hisparse.fsm.machine import ILLEGAL, columns
from hisparse.fsm.machines import (
    BLOCK_LEASE,
    HOST_PAGE,
    TRANSFER,
    BlockState,
    BlockTrigger,
    PageState,
    PageTrigger,
    TransferState,
    TransferTrigger,
)
from hisparse.fsm.wire import TransferKind
from hisparse.testing.explore import World
from hisparse.testing.explore.prepared import prepare
from hisparse.testing.explore.projection import Projection
from hisparse.testing.explore.promela import COMMAND, promela

WRITE_BACK, SPILL, RESTORE = (
    TransferKind.WRITE_BACK,
    TransferKind.SPILL,
    TransferKind.RESTORE,
)
TWO_RANKS = World(requests=1, ranks=2, transfers=1, failures=1)
TWO_PAGES = World(requests=1, ranks=1, pages=2, blocks=5, host_pages=3, failures=1)
LONG = {"requests": 2, "pages": 4, "blocks": 7, "host_pages": 8, "transfers": 1}
SPILLING = World(ranks=2, write_back="on_pressure", **LONG)
RESTORING = World(ranks=1, shared_pages=0, **LONG)

MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
spin_or_skip = pytest.mark.skipif(
    bool(MISSING) and os.environ.get("HISPARSE_SPIN") != "required",
    reason=f"not installed: {', '.join(MISSING)}",
)


def by_spin(prepared, folder):
    """States that Spin stored, and the invariant that it found violated ('' if none)."""
    (folder / "world.pml").write_text(promela(prepared))
    command = COMMAND.format(model="world.pml")
    ran = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
    stored = re.search(r"(\d+) states, stored", ran.stdout)
    assert stored, ran.stdout + ran.stderr
    assert "max search depth too small" not in ran.stdout
    found = re.findall(r"assertion violated.*!\((\w+)\)", ran.stdout)
    assert bool(found) == ("errors: 0" not in ran.stdout), ran.stdout
    return int(stored[1]), "".join(found)


def by_production_code(prepared, search=None):
    search = search or prepared.search()
    result = search.run()
    assert result.complete or result.violations
    return Projection(prepared).count(search), "".join(f.invariant for f in result.violations)


@contextmanager
def edited(machine, state, trigger, to):
    """One entry of a compiled table is another; the declaration that it was made of stays."""
    table = machine.table.copy()
    assert table[state, trigger] not in (to, ILLEGAL)
    table[state, trigger] = to
    entry, moves = mock.patch.object(machine, "table", table), columns(table)
    with entry, mock.patch.object(machine, "columns", moves):
        yield


@spin_or_skip
@pytest.mark.parametrize(
    ("world", "kind", "states"),
    [
        (TWO_RANKS, WRITE_BACK, 2217),
        (TWO_PAGES, WRITE_BACK, 679),
        (SPILLING, SPILL, 3590),
        (RESTORING, RESTORE, 1648),
    ],
    ids=["two_ranks", "two_pages", "spilling", "restoring"],
)
def test_spin_stores_as_many_states_as_production_code_meets(world, kind, states, tmp_path):
    prepared = prepare(world, kind)
    assert by_production_code(prepared) == by_spin(prepared, tmp_path) == (states, "")


@spin_or_skip
@pytest.mark.parametrize(
    ("machine", "state", "trigger", "to", "states", "invariant"),
    [
        (
            HOST_PAGE, PageState.ENQUEUED, PageTrigger.completed, PageState.PUBLISHED,
            676, "",
        ),
        (
            HOST_PAGE, PageState.ENQUEUED, PageTrigger.completed, PageState.FAILED,
            None, "host_reuse_after_readers",
        ),
        (
            HOST_PAGE, PageState.RESERVED, PageTrigger.pinned, PageState.COMPLETED,
            None, "complete_before_publish",
        ),
        (
            BLOCK_LEASE, BlockState.DIRTY, BlockTrigger.retired, BlockState.RESERVED,
            None, "conservation",
        ),
        (
            TRANSFER, TransferState.PINNED, TransferTrigger.enqueued_last, TransferState.COMPLETED,
            None, "IllegalTransition",
        ),
    ],
    ids=["page_published", "page_failed", "page_complete", "block_kept", "copy_complete"],
)  # fmt: skip
def test_another_entry_of_a_table_changes_both(
    machine, state, trigger, to, states, invariant, tmp_path
):
    prepared = prepare(TWO_PAGES, WRITE_BACK)
    search = prepared.search()
    with edited(machine, state, trigger, to):
        met, found = by_production_code(prepared, search)
        stored, found_by_spin = by_spin(prepared, tmp_path)
    assert found == found_by_spin == invariant
    assert invariant or met == stored == states != 679
