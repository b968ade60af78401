"""Copies that fail, and are known to have failed only steps later: after their pages were read."""

from __future__ import annotations

from hisparse.device.transfers import TransferQueue
from hisparse.device.worker import HiSparseWorker


class _Late:
    """An event that is not seen before its worker has ended step `until`."""

    def __init__(self, event, worker, until):
        self.event, self.worker, self.until = event, worker, until

    @property
    def done(self):
        return self.event.done and self.worker._last_step >= self.until


def fail_copies(monkeypatch, chosen, steps=0):
    """Copies for which ``chosen(transfer)`` is true fail, `steps` steps after they were
    queued at the earliest; returns the list that they are noted in."""
    failed, copy, begin = [], TransferQueue._copy, HiSparseWorker.begin_step

    def failing(self, transfer):
        if chosen(transfer):
            failed.append(transfer)
            return False
        return copy(self, transfer)

    def late(self, command):
        begin(self, command)
        pending = self.transfers._pending
        for i, (transfer, event, bad) in enumerate(pending):
            if bad and not isinstance(event, _Late):
                pending[i] = (transfer, _Late(event, self, command.step + steps), bad)

    monkeypatch.setattr(TransferQueue, "_copy", failing)
    monkeypatch.setattr(HiSparseWorker, "begin_step", late)
    return failed
