"""Small connector bases, named as serving engines name theirs; an engine passes both metas unread.

scheduler                                            worker
build_connector_meta() ── kv_connector_metadata ──►  start_load_kv(meta)
update_connector_output() ◄── KVConnectorOutput ───  get_output()
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class KVConnectorRole(enum.Enum):
    SCHEDULER = "scheduler"
    WORKER = "worker"


@dataclass(frozen=True)
class KVConnectorOutput:
    """What a worker hands back each step; `kv_connector_worker_meta` is opaque to the engine."""

    kv_connector_worker_meta: Any = None


@dataclass(frozen=True)
class Rewound:
    """A request whose last rows have to be computed again, since a copy that they read failed."""

    request: str
    epoch: int
    rows_computed: int
    """Rows that are valid now; the engine goes on after them, from the tokens that it has."""
    rows_certain: int
    """Rows from which sampled tokens stand; tokens of later ones were never certain: drop them."""


class SupportsHMA(ABC):
    """Mixin: the connector understands several cache groups that share one allocation."""

    @abstractmethod
    def request_finished_all_groups(self, request: str, epoch: int) -> None:
        """All groups of the request may be released (or kept, at the connector's will)."""


class KVConnectorBase_V1(ABC):
    """One role of a connector. Calls of the other role raise UsageError."""

    def __init__(self, role: KVConnectorRole) -> None:
        self.role = role

    @abstractmethod
    def build_connector_meta(self) -> Any:
        """Scheduler: the step's work for the workers, or None when there is none."""

    @abstractmethod
    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Scheduler: take in what a worker handed back."""

    def statistics(self) -> dict[str, int]:
        """Counters of this role, since it was made."""
        return {}

    def shutdown(self) -> KVConnectorOutput:
        """Scheduler: end all requests. Worker: let what is queued end, give all memory back, and
        hand over the last that the scheduler should know. Idempotent."""
        return KVConnectorOutput()

    def reset_cache(self) -> bool:
        """Scheduler: forget what prefixes could find; False where it cannot now, or has none."""
        return False

    def take_rewound(self) -> Sequence[Rewound]:
        """Scheduler: requests that went back since the last call, once each time that they did."""
        return ()

    @abstractmethod
    def start_load_kv(self, metadata: Any) -> None:
        """Worker: begin the step that `metadata` describes."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Worker: end the step; nothing more will be written in it."""

    @abstractmethod
    def get_output(self) -> KVConnectorOutput:
        """Worker: what the scheduler should know by now."""
