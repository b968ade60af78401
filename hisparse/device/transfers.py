"""TransferQueue: one rank's page copies, from the command that names them to their acknowledgement.

Owns the copies that are queued and not yet seen to have ended, and makes every wait between the
three streams; each wait has a name that a test can knock out. What `queue` and `wait_for` queue on
compute, d2h and h2d is drawn in `device.worker`.

Acknowledges ENQUEUED as a copy is queued, COMPLETED or FAILED once `poll` sees its event, each
stream's in the order in which they were queued. A copy that is made to fail leaves its destination
untouched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hisparse.device.acks import AckStream
from hisparse.device.backend import Copies, DeviceCalls, Event, Op, Stream
from hisparse.device.layout import Geometry
from hisparse.fsm.wire import (
    Ack,
    AckKind,
    AnyTransfer,
    IndexTransfer,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    TransferKind,
)

CopyFault = Callable[[AnyTransfer], bool]


def _into_gpu(transfer: AnyTransfer) -> bool:
    """Whether the copy writes the GPU block (on h2d), or reads it (on d2h)."""
    if isinstance(transfer, IndexTransfer):
        return transfer.load
    return transfer.kind == TransferKind.RESTORE


def _counter(transfer: AnyTransfer) -> str:
    if isinstance(transfer, IndexTransfer):
        return "index_pages_loaded" if transfer.load else "index_pages_stored"
    return f"{transfer.kind.name.lower()}s"


class TransferQueue:
    """Queues copies on d2h and h2d, and finds out how they ended.

    Args:
        calls: makes the device calls.
        geometry: sizes of blocks and pages.
        copies: makes the copies' device work.
        acks: the rank's acknowledgements.
        copy_fault: true for a transfer whose copy is made to fail.
    """

    def __init__(
        self,
        calls: DeviceCalls,
        geometry: Geometry,
        copies: Copies,
        acks: AckStream,
        copy_fault: CopyFault | None = None,
    ) -> None:
        self.device = calls.device
        self.geometry = geometry
        self.copy_fault = copy_fault
        self.highest = 0  # transfer id ever queued
        self.counts = dict.fromkeys(("spills", "write_backs", "restores", "failed"), 0)
        if geometry.suffix_pool_bytes:
            self.counts |= {"index_pages_stored": 0, "index_pages_loaded": 0}
        self._calls = calls
        self._made = copies
        self._acks = acks
        self._copies: dict[int, Event] = {}  # queued, event not yet seen; by transfer id
        self._pending: deque[tuple[AnyTransfer, Event, bool]] = deque()

    def __len__(self) -> int:
        """Copies that are not seen to have ended."""
        return len(self._pending)

    def wait_for(self, fences: Sequence[int]) -> None:
        """Whatever compute does next waits for the copies with these transfer ids."""
        for event in [self._copies[i] for i in fences if i in self._copies]:
            self._wait(self.device.compute, event, "compute_after_spill")

    def queue(self, command: SparseKVOffloadCommand) -> None:
        """Queue the copies of `command`, behind all that compute was given so far; what it is given
        next waits for those that write the GPU pool."""
        transfers: list[AnyTransfer] = [*command.transfers, *command.index_transfers]
        if not transfers:
            return
        device = self.device
        before = self._calls.record(device.compute)
        into_gpu = [_into_gpu(t) for t in transfers]
        if not all(into_gpu):
            self._wait(device.d2h, before, "d2h_after_compute")
        if any(into_gpu):
            self._wait(device.h2d, before, "h2d_after_compute")
        restored: Event | None = None
        for batch in self._batches(transfers):
            restore = _into_gpu(batch[0])
            copied = self._copy_batch(batch)
            event = self._calls.record(device.h2d if restore else device.d2h)
            restored = event if restore else restored
            for transfer, done in zip(batch, copied, strict=True):
                self._copies[transfer.transfer] = event
                self.highest = max(self.highest, transfer.transfer)
                self._pending.append((transfer, event, not done))
                self._acknowledge(AckKind.ENQUEUED, transfer)
                self.counts[_counter(transfer)] += 1
                self.counts["failed"] += not done
        if restored is not None:
            self._wait(device.compute, restored, "compute_after_restore")

    def poll(self) -> None:
        """Acknowledge the copies that have ended; never blocks."""
        still: deque[tuple[AnyTransfer, Event, bool]] = deque()
        late: set[bool] = set()  # streams whose oldest copy is not done: later ones are not either
        for transfer, event, failed in self._pending:
            restore = _into_gpu(transfer)
            if restore in late or not self.device.query(event):
                late.add(restore)
                still.append((transfer, event, failed))
                continue
            if self._copies.get(transfer.transfer) is event:
                del self._copies[transfer.transfer]
            self._acknowledge(AckKind.FAILED if failed else AckKind.COMPLETED, transfer)
        self._pending = still

    def close(self) -> None:
        """Every copy has ended: let the pools' views go, counters stay."""
        assert not self._pending, f"{len(self._pending)} copies have not ended"
        self._made.close()

    def _wait(self, stream: Stream, event: Event, why: str) -> None:
        """Every wait between streams goes through here."""
        self._calls.wait(stream, event, why)

    def _acknowledge(self, kind: AckKind, transfer: AnyTransfer) -> None:
        self._acks.append(Ack(kind, transfer.transfer, transfer.epoch))

    def _batches(self, transfers: Sequence[AnyTransfer]) -> list[list[AnyTransfer]]:
        """What shares an event: each by itself, or all of one direction."""
        if not self._made.batched:
            return [[transfer] for transfer in transfers]
        ways = [[t for t in transfers if _into_gpu(t) == restore] for restore in (False, True)]
        return [way for way in ways if way]

    def _copy_batch(self, batch: Sequence[AnyTransfer]) -> list[bool]:
        """Queue the copies of a batch; False for those that are made to fail."""
        if not self._made.batched:
            return [
                self._copy_index(t) if isinstance(t, IndexTransfer) else self._copy(t)
                for t in batch
            ]
        fault = self.copy_fault
        done = [fault is None or not fault(transfer) for transfer in batch]
        copied = [transfer for transfer, made in zip(batch, done, strict=True) if made]
        pages = [t for t in copied if isinstance(t, SparseKVPageTransfer)]
        index = [t for t in copied if isinstance(t, IndexTransfer)]
        stream = self._stream(batch[0])
        self._calls.enqueue(stream, [*self._page_ops(pages), *self._index_ops(index)], ())
        for transfer in copied:
            self._calls.enqueue(stream, (), _accesses(transfer), transfer.transfer)
        return done

    def _copy(self, transfer: SparseKVPageTransfer) -> bool:
        """Queue one page copy, all layers, a chunk each. False: the copy is made to fail."""
        if self.copy_fault is not None and self.copy_fault(transfer):
            return False
        ops, stream = self._page_ops([transfer]), self._stream(transfer)
        self._calls.enqueue(stream, ops, _accesses(transfer), transfer.transfer)
        return True

    def _copy_index(self, transfer: IndexTransfer) -> bool:
        """Queue one indexer page, a chunk a group; like `_copy`."""
        if self.copy_fault is not None and self.copy_fault(transfer):
            return False
        ops, stream = self._index_ops([transfer]), self._stream(transfer)
        self._calls.enqueue(stream, ops, _accesses(transfer), transfer.transfer)
        return True

    def _stream(self, transfer: AnyTransfer) -> Stream:
        return self.device.h2d if _into_gpu(transfer) else self.device.d2h

    def _page_ops(self, pages: Sequence[SparseKVPageTransfer]) -> Sequence[Op]:
        """Of pages that go one way."""
        if not pages:
            return ()
        blocks, hosts = [t.block for t in pages], [t.host for t in pages]
        if _into_gpu(pages[0]):
            return self._made.restore(hosts, blocks)
        return self._made.spill(blocks, hosts)

    def _index_ops(self, pages: Sequence[IndexTransfer]) -> Sequence[Op]:
        if not pages:
            return ()
        blocks, slots = [t.block for t in pages], [t.slot for t in pages]
        suffixes = [t.suffix for t in pages]
        if pages[0].load:
            return self._made.load_index(suffixes, blocks, slots)
        return self._made.store_index(blocks, slots, suffixes)


def _accesses(transfer: AnyTransfer) -> list[tuple[str, bool, tuple[int, ...]]]:
    """What its copy reads and writes."""
    into = _into_gpu(transfer)
    if isinstance(transfer, IndexTransfer):
        return [("gpu", into, (transfer.block,)), ("suffix", not into, (transfer.suffix,))]
    return [("gpu", into, (transfer.block,)), ("host", not into, (transfer.host,))]
