"""HiSparseConnector: the metadata and life-cycle boundary between coordinator and worker.

Owns no pool and no bytes. In its scheduler role it follows the log with one cursor a rank-group and
projects what is new into a command; write-ahead: the log is committed before a command leaves. In
its worker role it hands commands to the HiSparseWorker and acknowledgements back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec

from hisparse.connector.base import (
    KVConnectorBase_V1,
    KVConnectorOutput,
    KVConnectorRole,
    Rewound,
    SupportsHMA,
)
from hisparse.connector.plan import shown
from hisparse.errors import ProtocolError, UsageError
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.project import project
from hisparse.fsm.wire import Acknowledgements, SparseKVOffloadCommand
from hisparse.kv.coordinator import HiSparseCoordinator

if TYPE_CHECKING:
    from hisparse.device.worker import HiSparseWorker

_COMMANDS = msgspec.msgpack.Decoder(SparseKVOffloadCommand)
_ACKS = msgspec.msgpack.Decoder(tuple[Acknowledgements, ...])

T = TypeVar("T")


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, TypeError) as error:
        raise ProtocolError(f"{shown(data)} no message of {what} ({error})") from error


class HiSparseConnector(KVConnectorBase_V1, SupportsHMA):
    """Both roles of the local KV connector; metadata crosses as msgpack bytes.

    Args:
        role: SCHEDULER needs `coordinator`, WORKER needs `worker`.
    """

    def __init__(
        self,
        role: KVConnectorRole,
        *,
        coordinator: HiSparseCoordinator | None = None,
        worker: HiSparseWorker | None = None,
    ) -> None:
        super().__init__(role)
        needed = coordinator if role is KVConnectorRole.SCHEDULER else worker
        if needed is None:
            part = "coordinator" if role is KVConnectorRole.SCHEDULER else "worker"
            raise UsageError(f"HiSparseConnector in {role.value} role needs {part}=")
        self._coordinator = coordinator
        self._worker = worker
        self._cursor = (
            LogCursor(coordinator.log, coordinator.recovered_seq)
            if coordinator is not None
            else None
        )
        self.commands = 0  # built, or begun
        self._lost_at = 0  # seq by which a rank was lost, with all that followed from it
        self._step = 0  # the step under way, in worker role
        self.taken = 0  # acknowledgement messages that brought news
        self.inert = 0  # duplicates and messages of an old worker epoch

    @property
    def coordinator(self) -> HiSparseCoordinator:
        if self._coordinator is None:
            raise UsageError("this HiSparseConnector is in worker role: it has no coordinator")
        return self._coordinator

    @property
    def worker(self) -> HiSparseWorker:
        if self._worker is None:
            raise UsageError("this HiSparseConnector is in scheduler role: it has no worker")
        return self._worker

    def statistics(self) -> dict[str, int]:
        """``commands`` built (scheduler) or begun (worker); of a scheduler, the log's seq up to
        which they were built, and messages taken in, or passed over as old."""
        if self._cursor is None:
            return {"commands": self.commands}
        return {
            "commands": self.commands,
            "commands_seq": self.position,
            "messages_taken": self.taken,
            "messages_inert": self.inert,
        }

    # -- scheduler role ---------------------------------------------------------------------------
    @property
    def position(self) -> int:
        """The log's seq up to which commands were built: where the next one begins."""
        assert self._cursor is not None, "the worker role follows no log"
        return self._cursor.position

    def build_connector_meta(self) -> bytes | None:
        """The projection of all events since the last command; None when offload is disabled."""
        coordinator, cursor = self.coordinator, self._cursor
        assert cursor is not None
        self.commands += 1
        coordinator.log.commit()
        from_seq = cursor.position
        events = cursor.take(upto=coordinator.log.committed_seq)
        if not coordinator.config.offload:
            return None
        command = project(
            events,
            worker_epoch=coordinator.state.worker_epoch[0],
            from_seq=from_seq,
            poison=coordinator.config.checks == "on",
            epochs=tuple(epochs) if len(set(epochs := coordinator.state.worker_epoch)) > 1 else (),
        )
        return msgspec.msgpack.encode(command)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Acknowledgements go to the coordinator, whatever the state of any request queue."""
        coordinator = self.coordinator
        if output.kv_connector_worker_meta is None:
            return
        what = "acknowledgements: pass what get_output made"
        for acks in _decoded(_ACKS, output.kv_connector_worker_meta, what):
            if coordinator.update_acknowledgements(acks):
                self.taken += 1
            else:
                self.inert += 1

    def lose_rank(self, rank: int, reason: str = "lost", *, seen_epoch: int = 0) -> int:
        """See `HiSparseCoordinator.lose_rank`. Commands from here on go to the other ranks."""
        epoch = self.coordinator.lose_rank(rank, reason, seen_epoch=seen_epoch)
        self._lost_at = self.coordinator.state.seq
        return epoch

    def join_rank(self, rank: int) -> tuple[int, int] | None:
        """(worker epoch, seq of its cursor) of the worker that is to follow a lost one, which has
        to get every command from the next on; None while it cannot begin yet: go on stepping."""
        if self.position < self._lost_at:
            return None  # the next command still tells what happened to the lost one
        if not self.coordinator.join_rank(rank, self.position):
            return None
        return self.coordinator.state.worker_epoch[rank], self.position

    def attach(self, workers: Mapping[int, tuple[int, int]]) -> list[int]:
        """Go on, in a new process, with workers that are still there, by (worker epoch, seq of its
        cursor) of each rank (-1: it is gone, but that epoch is known). Commands begin where they
        are. Lost are ranks that are not named, of another epoch, behind others, beyond the end of
        the log, that joined in an end of the log which it lost, or that have not begun a step whose
        rows the log has accepted. Returns which.

        Raises UsageError once a command was built.
        """
        coordinator, cursor = self.coordinator, self._cursor
        assert cursor is not None
        if self.commands:
            raise UsageError("attach comes before the first command")
        state, end = coordinator.state, coordinator.recovered_seq
        there = {
            rank: to_seq
            for rank, (epoch, to_seq) in workers.items()
            if epoch == state.worker_epoch[rank]
            and coordinator.accepted_seq <= to_seq <= end
            and not state.lost >> rank & 1
        }
        position = max(there.values(), default=end)
        cursor.close()
        self._cursor = LogCursor(coordinator.log, position)
        lost = [rank for rank in range(state.config.ranks) if there.get(rank) != position]
        for rank in lost:
            self.lose_rank(rank, "not where the log is", seen_epoch=workers.get(rank, (0, 0))[0])
        return lost

    def take_rewound(self) -> list[Rewound]:
        return [
            Rewound(e.request, e.epoch, e.rows, e.certain) for e in self.coordinator.take_rewound()
        ]

    def request_finished_all_groups(self, request: str, epoch: int) -> None:
        self.coordinator.finish(request, epoch)

    def reset_cache(self) -> bool:
        """See `HiSparseCoordinator.reset_prefix_cache`."""
        return self.coordinator.reset_prefix_cache()

    # -- worker role ------------------------------------------------------------------------------
    def start_load_kv(self, metadata: bytes | None) -> None:
        worker = self.worker
        if metadata is not None:
            what = "a command: pass what build_connector_meta made"
            command = _decoded(_COMMANDS, metadata, what)
            worker.begin_step(command)
            self._step = command.step
            self.commands += 1

    def wait_for_save(self) -> None:
        self.worker.end_step(self._step)

    def get_output(self) -> KVConnectorOutput:
        return self._packed(self.worker.poll())

    def shutdown(self) -> KVConnectorOutput:
        if self._worker is not None:
            return self._packed(self._worker.shutdown())
        self.coordinator.abort_all("shutdown")
        return KVConnectorOutput()

    @staticmethod
    def _packed(acks: Acknowledgements | None) -> KVConnectorOutput:
        if acks is None:
            return KVConnectorOutput()
        return KVConnectorOutput(msgspec.msgpack.encode((acks,)))
