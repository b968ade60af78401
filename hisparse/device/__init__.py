"""Worker side: the pools, the copies, the resolve. The only package that touches an accelerator.

`open_device` picks a backend by name; `HiSparseWorker` (``device.worker``) runs on any of them.
"""

from __future__ import annotations

from hisparse.device.backend import Device
from hisparse.errors import ConfigError, DeviceError

USABLE = ("cpu",)
UNBUILT = ("cuda",)


def open_device(name: str, *, seed: int = 0, lag: float = 0.5, run_ahead: int = 4096) -> Device:
    """The backend `name`. `seed`, `lag` and `run_ahead` shape the simulated streams of ``cpu``.

    Raises DeviceError for a backend that is refused (ROCm) or missing, ConfigError for a name that
    nobody knows.
    """
    if name == "cpu":
        from hisparse.device.cpu.streams import SimDevice

        return SimDevice(seed=seed, lag=lag, run_ahead=run_ahead)
    if name in ("rocm", "hip"):
        raise DeviceError(f"{name}: ROCm is refused, nobody has written that worker yet")
    if name == "cuda":
        _refuse_hip()
        raise DeviceError("cuda: not built yet; use 'cpu'")
    raise ConfigError(
        f"device={name!r} is unknown: use one of {', '.join(USABLE)} "
        f"({', '.join(UNBUILT)}: not built yet)"
    )


def _refuse_hip() -> None:
    """A torch built for ROCm calls itself cuda; refuse it by its real name."""
    try:
        import torch
    except ImportError:
        return
    hip = getattr(torch.version, "hip", None)
    if hip:
        raise DeviceError(f"cuda: this torch is built for ROCm (torch.version.hip={hip}): refused")
