"""Copies that fail, and are known to have failed only steps later: after their pages were read."""

from __future__ import annotations

from hisparse.device.worker import HiSparseWorker


class _Late:
    """An event that is not seen before its worker has ended step `until`."""

    def __init__(self, event, worker, until):
        self.event, self.worker, self.until = event, worker, until

    @property
    def done(self):
        return self.event.done and self.worker._last_step >= self.until


def fail_copies(monkeypatch, chosen, steps=0):
    """Copies for which ``chosen(worker, transfer)`` is true fail, `steps` steps after they were
    queued at the earliest; returns the list that they are noted in."""
    failed, copy, queue = [], HiSparseWorker._copy, HiSparseWorker._queue_transfers

    def failing(self, transfer):
        if chosen(self, transfer):
            failed.append(transfer)
            return False
        return copy(self, transfer)

    def late(self, command):
        queue(self, command)
        for i, (transfer, event, bad) in enumerate(self._pending):
            if bad and not isinstance(event, _Late):
                self._pending[i] = (transfer, _Late(event, self, command.step + steps), bad)

    monkeypatch.setattr(HiSparseWorker, "_copy", failing)
    monkeypatch.setattr(HiSparseWorker, "_queue_transfers", late)
    return failed
