"""LocalReplica: both sides of one replica in one process, wired as an engine would wire them.

Owns a coordinator, a worker, and a connector in each role; they talk through the connectors alone.
`step` is one scheduler step around whatever the caller's model does in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from hisparse.config import HiSparseConfig, check_capacity
from hisparse.connector.base import KVConnectorOutput, KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.device import open_device
from hisparse.device.backend import Device, Sink
from hisparse.device.host_demand import check_node
from hisparse.device.host_limits import read_limits
from hisparse.device.rows import StepRows
from hisparse.device.transfers import CopyFault
from hisparse.device.worker import HiSparseWorker
from hisparse.errors import UsageError
from hisparse.fsm.log import EventLog, MemoryLog
from hisparse.kv.coordinator import HiSparseCoordinator

DRAIN_STEPS_MAX = 10_000


class LocalReplica:
    """One scheduler and one worker rank.

    Args:
        config: sizes and policy; refused with CapacityError if one request could not fit, or, where
            host pools are pinned, if those of all ranks do not fit this node.
        log: the scheduler's log (default: a ring in memory).
        device: the backend (default: ``cpu``).
        sink: gets the rank's own events.
        copy_fault: see `HiSparseWorker`.
    """

    def __init__(
        self,
        config: HiSparseConfig,
        *,
        log: EventLog | None = None,
        device: Device | None = None,
        sink: Sink | None = None,
        copy_fault: CopyFault | None = None,
    ) -> None:
        self.config = check_capacity(config)
        self.device = device if device is not None else open_device("cpu")
        if self.device.name == "cuda":  # its host pools are pinned: no byte more than there is
            check_node(config, read_limits())
        self.coordinator = HiSparseCoordinator(
            config, log if log is not None else MemoryLog(config.log.ring_events)
        )
        self.worker = HiSparseWorker(config, self.device, sink=sink, copy_fault=copy_fault)
        self.scheduler = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=self.coordinator)
        self.rank = HiSparseConnector(KVConnectorRole.WORKER, worker=self.worker)
        self._output = KVConnectorOutput()
        self._closed = False

    @contextmanager
    def step(
        self,
        rows: Sequence[int],
        wanted: Sequence[int],
        page_hashes: Sequence[tuple[int, bytes]] = (),
    ) -> Iterator[StepRows]:
        """Compute the next `wanted` rows of request rows `rows` inside the `with`.

        Yields the rows that have a place now (fewer than wanted under pressure). All of them count
        as computed and accepted when the block ends. `page_hashes`: see
        `HiSparseCoordinator.rows_computed`.
        """
        coordinator = self.coordinator
        self.scheduler.update_connector_output(self._output)
        granted = coordinator.grow(rows, wanted)
        planned = [(row, n) for row, n in zip(rows, granted, strict=True) if n]
        starts = {row: int(coordinator.state.rows.computed[row]) for row, _ in planned}
        step = coordinator.plan_step([row for row, _ in planned], [n for _, n in planned])
        self.rank.start_load_kv(self.scheduler.build_connector_meta())
        yield StepRows(
            np.repeat(
                np.array([row for row, _ in planned], dtype=np.int32), [n for _, n in planned]
            ),
            np.array([starts[row] + i for row, n in planned for i in range(n)], dtype=np.int64),
        )
        self.rank.wait_for_save()
        if planned:
            coordinator.rows_computed(
                step, [row for row, _ in planned], [n for _, n in planned], page_hashes
            )
        self._output = self.rank.get_output()

    def drain(self) -> None:
        """Step until ended requests have let go of everything. Raises UsageError if one is live."""
        for _ in range(DRAIN_STEPS_MAX):
            self.scheduler.update_connector_output(self._output)
            self._output = KVConnectorOutput()
            if not self.coordinator.state.requests:
                return
            with self.step([], []):
                pass
        held = list(self.coordinator.state.requests)
        raise UsageError(f"requests {held} do not end: finish or abort them first")

    def sleep(self, level: int = 1) -> bool:
        """`HiSparseCoordinator.sleep`, and a step without rows that tells the worker."""
        self.scheduler.update_connector_output(self._output)
        self._output = KVConnectorOutput()
        if not self.coordinator.sleep(level):
            return False
        with self.step([], []):
            pass
        return True

    def wake_up(self) -> None:
        """`HiSparseCoordinator.wake_up`; the worker hears of it with the next step."""
        self.coordinator.wake_up()

    def shutdown(self) -> None:
        """Abort what has not ended, drain, take in how every copy ended, unpin and free all memory.

        Idempotent. What a device error leaves unfinished keeps its memory, and is raised.
        """
        if self._closed:
            return
        self.scheduler.shutdown()
        self.drain()
        self.scheduler.update_connector_output(self.rank.shutdown())
        self.coordinator.log.commit()
        self._closed = True
