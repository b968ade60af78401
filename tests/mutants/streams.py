"""The worker's side: waits between streams, copies, rows, and what a rank decides by itself."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import msgspec

from hisparse.config import HiSparseConfig
from hisparse.device import worker
from hisparse.device.cpu import kernels
from hisparse.device.cpu.kernels import CpuCopies
from hisparse.device.transfers import TransferQueue
from hisparse.device.warm_up import dummy_step
from hisparse.device.worker import HiSparseWorker
from hisparse.engine import loop
from hisparse.fsm.project import Projection
from hisparse.fsm.wire import Table

from .registry import mutant

WAITS = (
    "compute_after_spill",
    "d2h_after_compute",
    "h2d_after_compute",
    "compute_after_restore",
)


@contextmanager
def drop_wait(why):
    """One kind of wait between streams is left out."""
    wait = TransferQueue._wait

    def leaky(self, stream, event, reason):
        if reason != why:
            wait(self, stream, event, reason)

    with mock.patch.object(TransferQueue, "_wait", leaky):
        yield


@mutant
def compute_waits_for_no_spill():
    """The wait compute_after_spill is left out."""
    with drop_wait("compute_after_spill"):
        yield


@mutant
def spills_wait_for_no_compute():
    """The wait d2h_after_compute is left out."""
    with drop_wait("d2h_after_compute"):
        yield


@mutant
def restores_wait_for_no_compute():
    """The wait h2d_after_compute is left out."""
    with drop_wait("h2d_after_compute"):
        yield


@mutant
def compute_waits_for_no_restore():
    """The wait compute_after_restore is left out."""
    with drop_wait("compute_after_restore"):
        yield


@mutant
def skip_one_host_copy():
    """One copy of a world, the fifth that any rank makes, is acknowledged and never made."""
    copy, made = TransferQueue._copy, [0]

    def skipping(self, transfer):
        made[0] += 1
        return True if made[0] == 5 else copy(self, transfer)

    with mock.patch.object(TransferQueue, "_copy", skipping):
        yield


@mutant
def last_layer_is_not_copied():
    """A page's copy to the host leaves its last layer out."""
    spill = CpuCopies.spill

    def short(self, blocks, hosts):
        return spill(self, blocks, hosts)[:-1]

    with mock.patch.object(CpuCopies, "spill", short):
        yield


@mutant
def fences_are_not_sent():
    """A command names no copies that compute has to wait for."""
    command = Projection.command

    def unfenced(self, *given):
        self.fences = []
        return command(self, *given)

    with mock.patch.object(Projection, "command", unfenced):
        yield


@mutant
def complete_before_it_ran():
    """A copy is acknowledged as complete when it is queued."""
    poll = TransferQueue.poll

    def hasty(self):
        with mock.patch.object(self.device, "query", lambda event: True):
            poll(self)

    with mock.patch.object(TransferQueue, "poll", hasty):
        yield


@mutant
def retired_before_it_ran():
    """A step is retired when it is queued."""
    poll = HiSparseWorker.poll

    def hasty(self):
        late = {id(event) for _, event in self._steps}
        query = self.device.query
        with mock.patch.object(self.device, "query", lambda e: id(e) in late or query(e)):
            return poll(self)

    with mock.patch.object(HiSparseWorker, "poll", hasty):
        yield


@mutant
def hot_rows_outlive_a_rewind():
    """The worker forgets no hot row of a page that was replaced on the host."""
    forget = kernels.forget_entries

    def forgetful(resolver, table, row, entries):
        if table != Table.HOST:
            forget(resolver, table, row, entries)

    with mock.patch.object(kernels, "forget_entries", forgetful):
        yield


@mutant
def rejected_drafts_accepted():
    """Rows of drafts count as accepted, whatever the target chose."""
    with mock.patch.object(loop, "standing", lambda drafts, chosen, eos: len(chosen)):
        yield


@mutant
def two_layers_share_their_bytes():
    """The second layer of a group is bound to the first one's storage, in every path alike: it
    agrees with itself. (test-oracle-shares-the-bug)"""
    bind = worker.bind_cache

    def shared(*given):
        cache = bind(*given)
        for group in cache.groups:
            first = cache.handles[group.layers[0]]
            for member, layer in enumerate(group.layers[1:], 1):
                handle = cache.handles[layer]
                handle.resident = first.resident
                handle.runtime.hot, handle.runtime.host = first.runtime.hot, first.runtime.host
                group.tiers[member] = group.tiers[0]
        return cache

    with mock.patch.object(worker, "bind_cache", shared):
        yield


@mutant
def rank_with_nothing_to_copy_returns_early():
    """A rank decides by itself that there is nothing for it to do.
    (rank-local-early-return-around-collective)"""
    begin = HiSparseWorker.begin_step

    def early(self, command):
        if self.rank and not command.transfers:
            command = msgspec.structs.replace(command, tables=())
        begin(self, command)

    with mock.patch.object(HiSparseWorker, "begin_step", early):
        yield


@mutant
def rank_sizes_its_own_pool():
    """A rank derives how many host pages there are from its own layers, and comes to one less.
    (pool-size-differs-per-stage)"""
    make = HiSparseWorker.__init__

    def smaller(self, config: HiSparseConfig, device, *, rank=0, **more):
        if rank and config.host_pages > 3:
            gib = config.pools.host_pool_gib * (config.host_pages - 1.5) / config.host_pages
            pools = config.pools.model_copy(update={"host_pool_gib": gib})
            config = config.model_copy(update={"pools": pools})
        make(self, config, device, rank=rank, **more)

    with mock.patch.object(HiSparseWorker, "__init__", smaller):
        yield


@mutant
def dummy_steps_compute_row_0():
    """A profiling step is made of rows of the first request, and not of padding.
    (warm-up-exceeds-decode-token-cap)"""

    @contextmanager
    def real(limits, device, groups, runtimes, rows):
        with dummy_step(limits, device, groups, runtimes, rows) as padding:
            padding.rows[:] = 0
            yield padding

    with mock.patch.object(worker, "dummy_step", real):
        yield


@mutant
def commands_apply_wherever_they_begin():
    """A worker takes any command, whatever its cursor and its epoch say."""
    with mock.patch.object(HiSparseWorker, "_check", lambda self, command: None):
        yield
