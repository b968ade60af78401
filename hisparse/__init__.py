"""hisparse: HiSparse local KV offload for sparse-MLA decode, as an event-sourced state machine.

A host tier under the GPU KV cache. The names here are what an engine needs; each is loaded when it
is first asked for, so that importing this package loads nothing else, and torch only where a tensor
or a GPU is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hisparse.backend import HiSparseBackend
    from hisparse.config import HiSparseConfig
    from hisparse.config_check import checked_config
    from hisparse.connector.base import Rewound
    from hisparse.connector.hisparse import HiSparseConnector
    from hisparse.connector.plan import Admitted, Changes, Refused, StepPlan, Waiting
    from hisparse.connector.scheduler import SchedulerConnector
    from hisparse.connector.worker import WorkerConnector
    from hisparse.device import open_device
    from hisparse.errors import (
        CapacityError,
        ConfigError,
        DeviceError,
        HiSparseError,
        InvariantViolation,
        LogError,
        ProtocolError,
        StaleEpoch,
        UsageError,
    )

__version__ = "0.1.0.dev0"

_HOMES = {
    "HiSparseBackend": "backend",
    "HiSparseConfig": "config",
    "checked_config": "config_check",
    "HiSparseConnector": "connector.hisparse",
    "SchedulerConnector": "connector.scheduler",
    "WorkerConnector": "connector.worker",
    "StepPlan": "connector.plan",
    "Admitted": "connector.plan",
    "Waiting": "connector.plan",
    "Refused": "connector.plan",
    "Changes": "connector.plan",
    "Rewound": "connector.base",
    "open_device": "device",
    "HiSparseError": "errors",
    "ConfigError": "errors",
    "CapacityError": "errors",
    "UsageError": "errors",
    "StaleEpoch": "errors",
    "ProtocolError": "errors",
    "LogError": "errors",
    "DeviceError": "errors",
    "InvariantViolation": "errors",
}

__all__ = [
    "Admitted",
    "CapacityError",
    "Changes",
    "ConfigError",
    "DeviceError",
    "HiSparseBackend",
    "HiSparseConfig",
    "HiSparseConnector",
    "HiSparseError",
    "InvariantViolation",
    "LogError",
    "ProtocolError",
    "Refused",
    "Rewound",
    "SchedulerConnector",
    "StaleEpoch",
    "StepPlan",
    "UsageError",
    "Waiting",
    "WorkerConnector",
    "__version__",
    "checked_config",
    "open_device",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hisparse' has no attribute {name!r}")
    value = getattr(import_module(f"hisparse.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
