"""The record of faults over a stream that lags: each fault that the host was told of makes room for
the next, and none is told twice, however late its copies arrive."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lagging_device import LaggingDevice

from hisparse.device.cuda import faults
from hisparse.device.cuda.faults import GROUPS_MAX, FaultRecord
from hisparse.errors import ConfigError, InvariantViolation


class Noted:
    """A record, and kernels that note faults in it as `note_fault` does: each at its own row."""

    def __init__(self):
        self.device, self.rows = LaggingDevice(), 0
        self.record = FaultRecord(self.device)
        self.owner = int(self.record.code("layer 0"))
        self.claims = []  # rows of the faults that found the record free
        self.told = []

    def note(self, kind=4):
        self.rows += 1
        words, row = self.record._record, self.rows

        def kernel():
            words[5 + kind] += 1
            if not words[0]:
                words[:5] = 1, kind, row, self.owner, 7
                self.claims.append(row)

        self.device.queue.append(kernel)

    def lose(self, counters, count, at=1):
        """A resolve that counts in `counters` finds no copy of so many entries."""

        def kernel():
            counters[at] += count

        self.device.queue.append(kernel)

    def lost(self, how="check_now"):
        """How many lost entries are told now."""
        if how == "check_now":
            self.device.run()
        try:
            getattr(self.record, how)()
        except InvariantViolation as error:
            return int(str(error).split()[1])
        return 0

    def ask(self, how):
        """`check` or `check_now`; what it raises is told."""
        if how == "check_now":
            self.device.run()
        try:
            getattr(self.record, how)()
        except InvariantViolation as error:
            self.told.append(int(str(error).split("row ")[1].split(",")[0]))
            return True
        return False


acts = st.lists(
    st.sampled_from(["note", "step", "check", "check", "check_now"]) | st.integers(1, 3),
    min_size=1,
    max_size=60,
)


@given(acts)
def test_what_found_the_record_free_is_told_once_and_in_turn(acts):
    noted = Noted()
    for act in acts:
        if act == "note":
            noted.note()
        elif act == "step":
            noted.record.copy_out()
        elif isinstance(act, int):
            noted.device.run(act)
        else:
            noted.ask(act)
    noted.ask("check_now")
    assert noted.told == noted.claims and not noted.ask("check_now")
    noted.device.run()
    noted.note()
    assert noted.ask("check_now") and noted.told[-1] == noted.rows, "there is room for the next"
    assert sum(noted.record.counts.values()) == noted.rows, "all are counted, told or not"


def test_a_fault_a_step_is_told_step_after_step():
    """The host is two steps behind: what a fault hides until it is told is counted."""
    noted = Noted()
    for _ in range(12):
        noted.note()
        noted.record.copy_out()
        noted.device.run(len(noted.device.queue) - 6)
        noted.ask("check")
    assert len(noted.told) >= 3 and noted.told == sorted(set(noted.told))


def test_more_steps_under_way_than_there_is_room_for_lose_no_fault():
    noted = Noted()
    for step in range(40):
        if step == 35:
            noted.note()
        noted.record.copy_out()
    noted.device.run()
    assert not noted.ask("check")
    noted.record.copy_out()
    noted.device.run()
    assert noted.ask("check") and not noted.ask("check")


def test_entries_that_were_lost_are_told_as_many_as_were_not_yet():
    noted = Noted()
    counters = noted.record.counters()
    assert counters.dtype == np.uint64 and len(counters) == 4
    for more in (3, 0, 2):
        noted.lose(counters, more)
        assert noted.lost() == more
    noted.lose(counters, 4, at=3)  # of calls whose rows are not copied out
    assert noted.lost() == 4
    counters[::2] = 7  # misses
    assert noted.lost() == 0 and noted.record.lost == 9


@given(st.lists(st.sampled_from(["note", "lose", "step", "step", "check"]), max_size=40))
def test_an_idle_device_tells_all_that_it_found_at_once(acts):
    """However many steps had untold faults or lost entries: who is told at the end asks once."""
    noted = Noted()
    counters = noted.record.counters()
    for act in acts:
        if act == "note":
            noted.note()
        elif act == "lose":
            noted.lose(counters, 1)
        elif act == "step":
            noted.record.copy_out()
        else:
            noted.device.run(3)
            with suppress(InvariantViolation):
                noted.record.check()
    noted.device.run()
    with suppress(InvariantViolation):
        noted.record.check_now()
    noted.device.run()
    noted.record.check_now()
    noted.record.check()
    assert noted.record.lost == acts.count("lose")


def test_groups_of_workers_that_are_gone_make_room_and_each_counts_from_zero():
    noted = Noted()
    for worker in range(2 * GROUPS_MAX):
        counters = noted.record.counters()
        noted.device.run()
        assert not counters.any()
        noted.lose(counters, worker % 3)
        assert noted.lost() == worker % 3
        noted.record.give_back(counters)
    noted.record.check_groups(GROUPS_MAX)


def test_a_late_copy_of_who_had_the_place_before_is_not_of_who_has_it(monkeypatch):
    monkeypatch.setattr(faults, "GROUPS_MAX", 1)
    noted = Noted()
    first = noted.record.counters()
    noted.lose(first, 5)
    noted.record.copy_out()
    noted.record.give_back(first)
    second = noted.record.counters()
    noted.record.copy_out()
    noted.lose(second, 2)
    noted.record.copy_out()
    noted.device.run()
    assert noted.lost("check") == 2 and noted.lost("check") == 0


def test_more_groups_than_there_is_room_for_are_refused_by_field_value_and_fix():
    record = Noted().record
    with pytest.raises(ConfigError, match=r"layout\.index_groups: 257 groups, with 0 .* 256: put"):
        record.check_groups(GROUPS_MAX + 1)
    for _ in range(GROUPS_MAX):
        record.counters()
    with pytest.raises(ConfigError, match=r"1 groups, with 256 .* shut a worker down"):
        record.counters()
