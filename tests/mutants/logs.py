"""The fold, the log, who follows it, who goes on with it."""

from __future__ import annotations

from unittest import mock

from hisparse.connector import hisparse as connector
from hisparse.fsm import events as ev
from hisparse.fsm import log_writer, project
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.evolve import blocks as evolve_blocks
from hisparse.kv import (
    coordinator,
    interruptions,
    restart,
)
from hisparse.kv.coordinator import HiSparseCoordinator

from .registry import mutant, nothing


@mutant
def table_update_lost():
    """The projection forgets that spilled pages are read from the host now."""
    add = project.Projection.add

    def forgetful(self, e):
        if isinstance(e, ev.PagesSpilled):
            kept = len(self.tables)
            add(self, e)
            del self.tables[kept:]
        else:
            add(self, e)

    with mock.patch.object(project.Projection, "add", forgetful):
        yield


@mutant
def fold_forgets():
    """Something outside the fold changes the live state: the log does not say so."""
    tick = HiSparseCoordinator.tick

    def drifting(self, now_us):
        tick(self, now_us)
        self.state.now_us += 1

    with mock.patch.object(HiSparseCoordinator, "tick", drifting):
        yield


@mutant
def drift_that_heals():
    """The live state is wrong for three steps, then right again."""
    plan = HiSparseCoordinator.plan_step

    def drifting(self, rows, counts):
        step = plan(self, rows, counts)
        self.state.pages.epoch[0] = 1 if 3 <= step < 6 else 0
        return step

    with mock.patch.object(HiSparseCoordinator, "plan_step", drifting):
        yield


@mutant
def order_by_the_clock():
    """In which order blocks become free follows something outside of the log.
    (replay-not-deterministic)"""
    times = [0]
    free = evolve_blocks.free_blocks

    def unordered(state, blocks):
        times[0] += 1
        free(state, blocks[::-1] if times[0] % 3 == 0 else blocks)

    with mock.patch.object(evolve_blocks, "free_blocks", unordered):
        yield


@mutant
def counted_on_both_sides():
    """A prefix hit is counted where it is decided, and again where it is logged.
    (metrics-double-or-zero)"""
    admit = coordinator.HiSparseCoordinator.admit_waiting

    def counting(self):
        admitted = admit(self)
        for key in admitted:
            self.metrics.counts["prefix_hit_pages"] += int(self.state.requests[key].hit_tokens > 0)
        return admitted

    with mock.patch.object(coordinator.HiSparseCoordinator, "admit_waiting", counting):
        yield


@mutant
def cursor_passes_over_an_event():
    """Off by one: a consumer that has much to read is not given the last of it."""

    class Hasty(LogCursor):
        __slots__ = ()

        def take(self, upto=None):
            taken = super().take(upto)
            return taken[:-1] if len(taken) > 12 else taken

    with mock.patch.object(connector, "LogCursor", Hasty):
        yield


@mutant
def commands_leave_before_the_commit():
    """Workers act on events that no log holds yet."""
    build = connector.HiSparseConnector.build_connector_meta

    def early(self):
        log = self.coordinator.log
        with (
            mock.patch.object(type(log), "commit", lambda self: None),
            mock.patch.object(type(log), "committed_seq", log.last_seq),
        ):
            return build(self)

    with mock.patch.object(connector.HiSparseConnector, "build_connector_meta", early):
        yield


@mutant
def commits_are_not_synced():
    """A commit writes, and what it wrote is not forced to the disk."""
    write = log_writer.SegmentWriter.write

    def lazy(self, data, *, sync):
        write(self, data, sync=False)

    with mock.patch.object(log_writer.SegmentWriter, "write", lazy):
        yield


@mutant
def recovery_drops_the_last_decision():
    """Who goes on with a log leaves out what its last input would have led to."""
    complete = restart.complete

    def without(state, last, suffix, cause):
        return complete(state, None, suffix, cause)

    with mock.patch.object(restart, "complete", without):
        yield


@mutant
def recovery_forgets_who_was_waited_for():
    """A scheduler that goes on with a log takes a rank along, wherever that has got to."""
    attach = connector.HiSparseConnector.attach

    def trusting(self, workers):
        end = self.coordinator.recovered_seq
        there = {rank: (epoch, min(seq, end)) for rank, (epoch, seq) in workers.items()}
        self.coordinator.accepted_seq = 0
        return attach(self, there)

    with mock.patch.object(connector.HiSparseConnector, "attach", trusting):
        yield


@mutant
def a_lost_rank_comes_back_to_full_caches():
    """A rank that joins has none of what is cached, and the caches are not emptied."""
    join = coordinator.HiSparseCoordinator.join_rank

    def keeping(self, rank, at_seq):
        with mock.patch.object(interruptions, "drop_all", nothing):
            return join(self, rank, at_seq)

    with mock.patch.object(coordinator.HiSparseCoordinator, "join_rank", keeping):
        yield


@mutant
def a_lost_rank_is_waited_for():
    """What a lost rank had not answered is not taken for failed."""
    with mock.patch.object(restart, "answered", nothing):
        yield
