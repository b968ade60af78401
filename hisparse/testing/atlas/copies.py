"""Copies that fail on a rank: nothing of them written, or a part."""

from __future__ import annotations

from hisparse.fsm.machines import PageState
from hisparse.fsm.wire import AnyTransfer, IndexTransfer, SparseKVPageTransfer, TransferKind
from hisparse.testing.atlas.base import Fault
from hisparse.testing.rank import SimRank

VALID = (PageState.COMPLETED, PageState.PUBLISHED)


class CopyFailed(Fault):
    family = "copies"
    kind = "copy_failed"
    rule = "what a failed copy was to write never becomes valid, and is never found by prefix"
    share = 0.25  # bytes that a failed copy explains are no violation at once: not in every world
    marks = ("copy_failed.to_host", "copy_failed.to_gpu", "copy_failed.suffix")

    def copy_fails(self, rank: SimRank, transfer: AnyTransfer) -> bool:
        if not self.strikes():
            return False
        self.spoil(rank, transfer)
        index = isinstance(transfer, IndexTransfer)
        restore = not index and transfer.kind is TransferKind.RESTORE  # type: ignore[union-attr]
        to = "suffix" if index else "to_gpu" if restore else "to_host"
        told = f"transfer {transfer.transfer} on rank {rank.number}"
        self.fire(told, lambda: self._over(transfer), f"{self.kind}.{to}")
        return True

    def spoil(self, rank: SimRank, transfer: AnyTransfer) -> None:
        """What the copy does before it fails: nothing."""

    def _over(self, transfer: AnyTransfer) -> bool:
        state = self.replica.state
        if isinstance(transfer, SparseKVPageTransfer):
            if transfer.kind is not TransferKind.RESTORE:
                same = int(state.pages.epoch[transfer.host]) == transfer.host_epoch
                valid = same and state.pages.state[transfer.host] in VALID
                self.require(not valid, f"host page {transfer.host} of {transfer} is valid")
            return transfer.transfer not in state.transfers
        return transfer.transfer not in state.suffix_copies


class CopyPartial(CopyFailed):
    kind = "copy_partial"
    rule = "a copy that wrote a part before it failed is as if it had written nothing"
    marks = ("copy_partial.to_host", "copy_partial.to_gpu", "copy_partial.suffix")

    def spoil(self, rank: SimRank, transfer: AnyTransfer) -> None:
        """Its first layer, or its first index group, arrives."""
        worker, device = rank.worker, rank.device
        rows = worker.geometry.page_size
        if isinstance(transfer, IndexTransfer):
            host = (worker.suffix[0], transfer.suffix, 0)
            gpu = (worker.index.views[0], transfer.block, transfer.slot * rows)
            into_gpu = transfer.load
        else:
            handle = worker.handles[0]
            host = (handle.runtime.host, transfer.host, 0)
            gpu = (handle.resident, transfer.block, 0)
            into_gpu = transfer.kind is TransferKind.RESTORE
        if into_gpu:
            device.copy_rows(device.h2d, host, gpu, rows)  # type: ignore[arg-type]
        else:
            device.copy_rows(device.d2h, gpu, host, rows)  # type: ignore[arg-type]
