"""`HiSparseWorker`: one rank's transfers of a step, and the life of its pools.

Owns the packed GPU pool and the pinned host pool (their bytes, never their blocks: it allocates and
frees no logical block), the device tables, and the rank's acknowledgement stream. What to copy
where comes from the command and from nothing else.

Consumes the scheduler's log by cursor: a command continues at the last `to_seq` in the same worker
epoch, or nothing of it is applied. Emits, in its own stream, `WorkerOpened`, `CommandApplied`,
`AckSent`, and through `DeviceCalls` the records, waits and accesses that it really made (transfers,
poison, index copies; row writes and gathers find their blocks on the device and are not listed).

What `begin_step` queues; ``E`` is one event, and each wait has a name that a test can knock out::

    compute  [wait fenced copies] resets, tables, poison, index copies, E [wait restores] step ...
                compute_after_spill                                        compute_after_restore
    d2h      poisoned pages  [wait E] spills, write-backs
                                d2h_after_compute
    h2d                      [wait E] restores
                                h2d_after_compute
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import msgspec

from hisparse.config import HiSparseConfig
from hisparse.device.acks import AckStream
from hisparse.device.apply import CommandApplier, check_command
from hisparse.device.backend import Array, Device, DeviceCalls, Event, Sink
from hisparse.device.binding import bind_cache
from hisparse.device.checks import checksum_bytes
from hisparse.device.handle import HiSparseCacheHandle
from hisparse.device.layout import POISON, Geometry
from hisparse.device.rows import StepRows
from hisparse.device.tables import DeviceTables
from hisparse.device.transfers import CopyFault, TransferQueue
from hisparse.device.warm_up import Capabilities, dummy_step
from hisparse.errors import DeviceError, ProtocolError, UsageError
from hisparse.fsm import events
from hisparse.fsm.wire import (
    Ack,
    AckKind,
    Acknowledgements,
    SparseKVOffloadCommand,
)

_POISON_LIMIT_BYTES = 1 << 28
_POOLS = "gpu_pool", "host_pool", "suffix_pool"


class HiSparseWorker:
    """The worker side of one rank.

    Args:
        config: what scheduler and worker agree on.
        device: the backend; the worker queues on its three streams.
        rank: this rank's number.
        worker_epoch: raised at every restart; commands of another epoch are refused.
        at_seq: the log's seq from which this worker epoch consumes.
        sink: gets the rank's own events as they happen.
        copy_fault: a transfer for which it returns True is acknowledged, then FAILED; its
            destination is left untouched.
    """

    def __init__(
        self,
        config: HiSparseConfig,
        device: Device,
        *,
        rank: int = 0,
        worker_epoch: int = 1,
        at_seq: int = 0,
        sink: Sink | None = None,
        copy_fault: CopyFault | None = None,
    ) -> None:
        self.config = config
        geometry = Geometry.of(config)
        # Where copies are made to fail, bytes that nobody wrote are read, and thrown away later.
        self.geometry = replace(geometry, checks=geometry.checks and copy_fault is None)
        device.kernels.check(config)
        self.device = device
        self.rank = rank
        self.worker_epoch = worker_epoch
        self.to_seq = at_seq
        self.calls = DeviceCalls(device, sink)
        self.acks = AckStream(rank, worker_epoch, self.calls)
        pools = self.geometry.gpu_pool_bytes, self.geometry.host_pool_bytes
        pool_bytes = sum(pools) + self.geometry.suffix_pool_bytes
        poisoned = config.checks == "on" and pool_bytes <= _POISON_LIMIT_BYTES
        self._fill = POISON if poisoned else 0
        self.gpu_pool: Array = None
        self.host_pool: Array = None
        self.suffix_pool: Array | None = None
        self.handles: tuple[HiSparseCacheHandle, ...] = ()
        self._step: int | None = None
        self._last_step = -1
        self._stopped = self._closed = False
        self.asleep = 0
        self._without_memory: set[str] = set()  # of these pools
        self._steps: deque[tuple[int, Event]] = deque()
        self._commands = self._index_pages_copied = 0
        self.tables = DeviceTables(self.geometry, device)
        try:
            self._allocate()
            self._set_up(copy_fault)
            self.calls.emit(events.WorkerOpened(at_seq, rank, worker_epoch, at_seq))
        except BaseException as error:  # who wanted it has nothing to shut down
            device.kernels.drop(self.tables)
            try:
                self._release_pools()
            except DeviceError as failed:  # pinning had: it is told once
                error.add_note(str(failed))
                self._release_pools()
            raise

    def _allocate(self) -> None:
        geometry, pinned, fill = self.geometry, self.device.allocate_pinned, self._fill
        layer_bytes = geometry.host_pool_bytes // geometry.layers
        self.gpu_pool = self.device.allocate(geometry.gpu_pool_bytes, fill)
        self.host_pool = pinned(geometry.host_pool_bytes, fill, geometry.page_bytes, layer_bytes)
        if suffix_bytes := geometry.suffix_pool_bytes:
            self.suffix_pool = pinned(suffix_bytes, fill, geometry.index_page_bytes)

    def _set_up(self, copy_fault: CopyFault | None) -> None:
        cache = bind_cache(
            self.geometry, self.device, self.tables, self.gpu_pool, self.host_pool, self.suffix_pool
        )
        self.suffix = cache.suffix
        self.index = cache.index
        self.groups = cache.groups
        self._runtimes = tuple(handle.runtime for handle in cache.handles)
        copies = self.device.kernels.make_copies(self.geometry, cache)
        self._applier = CommandApplier(self.calls, self.tables, cache, copies)
        self.transfers = TransferQueue(self.calls, self.geometry, copies, self.acks, copy_fault)
        self.bind(cache.handles)

    def bind(self, handles: Sequence[HiSparseCacheHandle]) -> None:
        """Register the handles that cache set-up bound: these very objects, one a layer."""
        if [handle.layer for handle in handles] != list(range(self.geometry.layers)):
            raise UsageError(f"bind needs one handle for each layer 0..{self.geometry.layers - 1}")
        for handle in handles:
            if handle.resident.base is not self.gpu_pool:
                raise UsageError(f"layer {handle.layer} is bound to another allocation")
        self.handles = tuple(handles)

    @property
    def capabilities(self) -> Capabilities:
        """The most that this rank takes in a step: to be asked before an engine profiles."""
        return Capabilities.of(self.config)

    def warm_up(self, rows: int) -> AbstractContextManager[StepRows]:
        """A dummy step between steps, or before the first: yields `rows` padding rows, for which
        the caller's model writes and gathers as ever. See `device.warm_up`.

        Raises UsageError if closed, inside a step, or for more rows than `capabilities` says.
        """
        if self._stopped or self._step is not None:
            what = "the worker is closed" if self._stopped else f"inside step {self._step}"
            raise UsageError(f"rank {self.rank}: warm_up({rows}): {what}")
        return dummy_step(
            self.capabilities, self.device, self.groups, [*self._runtimes, self.index], rows
        )

    # -- a step ----------------------------------------------------------------------------------
    def begin_step(self, command: SparseKVOffloadCommand) -> None:
        """Queue all work of `command`; returns at once.

        Raises ProtocolError, with nothing applied, if the command does not continue this cursor in
        this worker epoch or names what does not exist; UsageError if closed or inside a step.
        Where memory is refused, or pinning failed (DeviceError), or a fault is told as the worker
        goes to sleep (InvariantViolation), the step has not begun, and the call may be repeated.
        """
        self._check(command)
        for level in command.memory:
            self._set_memory(level)
        if self.asleep:
            command = msgspec.structs.replace(
                command, poison_blocks=(), poison_hosts=(), poison_suffixes=()
            )
        self.device.kernels.wait_host(self.tables, command)
        self.to_seq = command.to_seq
        self.calls.cause = command.to_seq
        self._step = command.step
        self.calls.emit(
            events.CommandApplied(command.to_seq, command.step, command.from_seq, command.to_seq)
        )
        self.transfers.wait_for(command.fences)
        self._index_pages_copied += self._applier.apply(command)
        for group in self.groups:
            group.begin_step(command.step)
        self.transfers.queue(command)
        for rank, seq in command.acked:
            if rank == self.rank:
                self.acks.trim(seq)
        self._commands += 1

    def _check(self, command: SparseKVOffloadCommand) -> None:
        if self._stopped:
            raise UsageError(f"rank {self.rank}: the worker is shut down")
        asleep = [self.asleep, *command.memory][-1]
        if asleep and (command.transfers or command.index_transfers or command.index_copies):
            raise ProtocolError(f"step {command.step}: copies while the pools have no memory")
        if self._step is not None:
            raise UsageError(f"begin_step({command.step}) before end_step({self._step})")
        if (epoch := command.epoch_of(self.rank)) != self.worker_epoch:
            raise ProtocolError(
                f"rank {self.rank}: command of worker epoch {epoch}, "
                f"this is epoch {self.worker_epoch}"
            )
        if command.from_seq != self.to_seq or command.to_seq < command.from_seq:
            raise ProtocolError(
                f"rank {self.rank}: command ({command.from_seq}, {command.to_seq}] does not "
                f"continue the cursor at to_seq {self.to_seq}"
            )
        if command.step <= self._last_step:
            raise ProtocolError(f"step {command.step} after step {self._last_step}")
        for rank, seq in command.acked:
            if rank == self.rank and seq > self.acks.last_seq:
                raise ProtocolError(
                    f"rank {rank}: acknowledgements taken up to {seq}, this rank sent "
                    f"{self.acks.last_seq}"
                )
        late = [i for i in command.fences if i > self.transfers.highest]
        if late:
            raise ProtocolError(f"fences {late}: this worker epoch never queued them")
        check_command(self.geometry, self.tables, command)

    def end_step(self, step: int) -> None:
        """All device work of `step` is queued; RETIRED follows once it has happened.

        Raises UsageError if `step` is not the step begun, or a follower left out a plan.
        """
        if self._step is None or step != self._step:
            raise UsageError(f"end_step({step}) inside step {self._step}")
        for group in self.groups:
            group.check_replayed()
        self.device.close_step()
        self._steps.append((step, self.calls.record(self.device.compute)))
        self._last_step, self._step = step, None

    def poll(self) -> Acknowledgements | None:
        """What can be acknowledged by now; never blocks.

        Returns everything that no command has said was taken in (so that a message that got lost
        is sent again by itself, and duplicates are inert at the scheduler); None if nothing is.
        A step's RETIRED comes after the COMPLETED of its restores. Raises InvariantViolation for
        a fault that the device found in an earlier step; what ended is then said by the next call.
        """
        ended = 0
        while ended < len(self._steps) and self.device.query(self._steps[ended][1]):
            ended += 1
        self.device.check()
        self.transfers.poll()
        for _ in range(ended):
            self.acks.append(Ack(AckKind.RETIRED, self._steps.popleft()[0]))
        return self.acks.pending()

    def host_writes(self) -> Event:
        """A point behind every write of the host tiers that is queued by now: spills, write-backs,
        indexer pages stored, poison. Never blocks.

        Who reads these with the CPU, and not just a page whose copy was COMPLETED and that nothing
        was told to write since, waits for it: ``device.synchronize(event)``, or asks
        ``device.query(event)``. Raises UsageError if closed.
        """
        if self._closed:
            raise UsageError(f"rank {self.rank}: host_writes() of a worker without pools: closed")
        return self.device.d2h.record()  # the stream of all who write there

    def _set_memory(self, level: int) -> None:
        """Sleep (1: the GPU pool, 2: the host tiers too) or wake (0). Addresses, views and tables
        stay; content goes. A worker that began while others slept is awake already. Repeated after
        an error, it goes on at the pool that was refused."""
        if level == self.asleep:
            return
        self.device.synchronize(None)
        for i, name in enumerate(_POOLS):
            gone = level > min(i, 1)
            if (pool := getattr(self, name)) is None or gone == (name in self._without_memory):
                continue
            if gone:
                self.device.discard(pool)
                self._without_memory.add(name)
            else:
                self.device.recommit(pool, self._fill)
                self._without_memory.remove(name)
        self.asleep = level

    def shutdown(self) -> Acknowledgements | None:
        """Take no more work, let what is queued end, say how, then unpin and free all pools.

        Returns what the scheduler has not said it took in. Idempotent: a second call returns None.
        If the device cannot end its work the error goes up and all memory stays as it is, since
        something may still write to it; the call may be repeated. So it may after an error of the
        memory itself, which is raised once: it was not unpinned, or pinning had failed and no step
        was told.
        """
        if self._closed:
            return None
        self._stopped = True
        self.device.synchronize(None)
        last = self.poll()
        self.transfers.close()
        self.device.kernels.drop(self.tables)
        self._release_pools()
        self._closed = True
        self.acks.close()
        self.handles = self.groups = self._runtimes = ()
        del self._applier, self.index, self.suffix
        return last

    def _release_pools(self) -> None:
        for name in _POOLS:
            if (pool := getattr(self, name)) is not None:
                self.device.release(pool)
            setattr(self, name, None)

    # -- counters --------------------------------------------------------------------------------
    def group_statistics(self, group: int) -> dict[str, int]:
        """Of one index group: entries hit, missed, resident; rows and bytes read by all layers."""
        layers = [r.statistics() for r in self._runtimes if r.group.group == group]
        total = {name: sum(s[name] for s in layers) for name in ("host_rows", "host_bytes")}
        lead = next(s for s in layers if "hits" in s)
        return {name: lead[name] for name in ("hits", "misses", "resident")} | total

    def statistics(self) -> dict[str, int]:
        """Work queued and acknowledged so far, and the groups' counters added up; bytes of
        replacement state and of row checksums (`checks.checksum_bytes`)."""
        counts = {"commands": self._commands, **self.transfers.counts}
        counts["index_pages_copied"] = self._index_pages_copied
        for group in self.groups:
            for name, value in self.group_statistics(group.group).items():
                counts[name] = counts.get(name, 0) + value
        counts["transfers_pending"] = len(self.transfers)
        counts["steps_pending"] = len(self._steps)
        counts["acks"] = self.acks.last_seq
        counts["state_bytes"] = sum(r.state_bytes for r in self._runtimes)
        checksums = checksum_bytes(self.geometry)
        counts["checksum_bytes"] = checksums.taken
        counts["checksum_bytes_refused"] = checksums.refused
        return counts
