"""`Halves`: the two halves of a replica of one rank, in one process, and the logs that they write.

Opens a `SchedulerConnector`, a `WorkerConnector` and, where the scheduler's log has a directory,
the rank's log beside it; closes the logs that it opened, also if the rest cannot be opened.
What passes between the halves is `HiSparseBackend`'s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict
from pydantic import ValidationError

from hisparse.config import HiSparseConfig, LogConfig
from hisparse.config_check import config_error, usable_config
from hisparse.connector.scheduler import SchedulerConnector
from hisparse.connector.worker import WorkerConnector
from hisparse.device import as_device
from hisparse.device.host_demand import check_node
from hisparse.device.host_limits import read_limits
from hisparse.errors import ConfigError, UsageError
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.log import EventLog
from hisparse.fsm.log_open import open_log

if TYPE_CHECKING:
    from hisparse.device.backend import Device, Sink
    from hisparse.device.transfers import CopyFault


class Halves:
    """Arguments and errors are those of `HiSparseBackend`; `config` is what they come to."""

    def __init__(
        self,
        config: HiSparseConfig | Mapping[str, Any],
        device: Device | str,
        *,
        log: EventLog | Path | str | None,
        sink: Sink | None,
        copy_fault: CopyFault | None,
    ) -> None:
        config = usable_config(config)
        if config.ranks != 1:
            raise ConfigError(
                f"ranks={config.ranks}: HiSparseBackend is a replica of one rank, so ranks must be "
                "1; several have a WorkerConnector each, and one SchedulerConnector",
                {"ranks": 1},
            )
        if log is not None and not isinstance(log, str | Path) and not hasattr(log, "append"):
            raise UsageError(f"log={log!r} must be a directory, as str or Path, or an EventLog")
        if isinstance(log, str | Path):
            try:
                kept = LogConfig(**config.log.model_dump() | {"mode": "disk", "dir": Path(log)})
            except ValidationError as error:
                raise config_error(error, LogConfig) from None
            config, log = config.model_copy(update={"log": kept}), None
        self.config = config
        device = as_device(device)
        if device.name == "cuda":  # its host pools are pinned: no byte more than there is
            check_node(config, read_limits())
        ranks_own = sink is None and log is None and config.log.mode == "disk"
        if ranks_own and config.log.dir is not None:
            _check_no_rank_alone(config.log.dir)
        self.closed = False
        with ExitStack() as owned:  # in reverse, what a failure below leaves open
            self.scheduler = SchedulerConnector(config, log=log)
            if log is None:
                owned.callback(self.scheduler.coordinator.log.close)
            self._rank_log: EventLog | None = None
            if ranks_own:
                self._rank_log = open_log(
                    config.log,
                    Codec(EVENT_TYPES),
                    stream="rank-0",
                    config_json=config.model_dump_json(),
                )
                owned.callback(self._rank_log.close)
                sink = self._rank_log.append
            self.rank = WorkerConnector(config, device=device, sink=sink, copy_fault=copy_fault)
            self._owned = owned.pop_all()

    def commit_rank_log(self) -> None:
        if self._rank_log is not None:
            self._rank_log.commit()

    def close(self) -> None:
        """Close the logs; the rank is shut down by then."""
        self.closed = True
        self._owned.close()

    def statistics(self) -> dict[str, Any]:
        """See `HiSparseBackend.statistics`."""
        coordinator, worker = self.scheduler.coordinator, self.rank.worker
        return {
            "scheduler": self.scheduler.statistics(),
            "coordinator": coordinator.statistics(),
            **coordinator.pool_statistics(),
            "events": coordinator.metrics.statistics(),
            "log": asdict(coordinator.log.statistics()),
            "rank_log": {} if self._rank_log is None else asdict(self._rank_log.statistics()),
            "rank": self.rank.statistics(),
            "worker": {} if self.closed else worker.statistics(),
            "groups": [worker.group_statistics(group.group) for group in worker.groups],
            "index": {} if self.closed else worker.index.statistics(),
            "layers": [handle.statistics() for handle in worker.handles],
            "device": self.rank.device.statistics(),
        }


def _check_no_rank_alone(directory: Path) -> None:
    """Raise UsageError where a rank's own events lie without those of its scheduler: they would go
    on with another's."""
    if not os.path.isdir(directory):  # it may have no name at all, which `open_log` says
        return
    if not any(directory.glob("scheduler/*.seg*")) and any(directory.glob("rank-0/*.seg*")):
        raise UsageError(
            f"log.dir={str(directory)!r} holds the events of a rank, 'rank-0', and no scheduler's: "
            "give an empty directory, or remove it"
        )
