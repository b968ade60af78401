"""Worker side: the pools, the copies, the resolve. The only package that touches an accelerator.

`open_device` picks a backend by name; `HiSparseWorker` (``device.worker``) runs on any of them.
"""

from __future__ import annotations

from hisparse.device.backend import Device
from hisparse.errors import ConfigError, DeviceError

USABLE = ("cpu", "cuda")


def open_device(name: str, *, seed: int = 0, lag: float = 0.5, run_ahead: int = 4096) -> Device:
    """The backend `name`. `seed`, `lag` and `run_ahead` shape the simulated streams of ``cpu``.

    ``cuda`` is torch's current device. Raises DeviceError for a backend that is refused (ROCm) or
    misses something (it says what), ConfigError for a name that nobody knows.
    """
    check_device(name)
    if name == "cpu":
        from hisparse.device.cpu.streams import SimDevice

        return SimDevice(seed=seed, lag=lag, run_ahead=run_ahead)
    from hisparse.device.cuda.device import CudaDevice

    return CudaDevice()


def check_device(name: str) -> None:
    """That there is a backend `name`; nothing is opened. Raises as `open_device` does."""
    if name in ("rocm", "hip"):
        raise DeviceError(f"{name}: ROCm is refused, nobody has written that worker yet")
    if name not in USABLE:
        raise ConfigError(f"device={name!r} is unknown: use one of {', '.join(USABLE)}")


def as_device(device: Device | str) -> Device:
    """`device`, opened if it is a name. Raises as `open_device` does, and ConfigError for what is
    neither."""
    if isinstance(device, str):
        return open_device(device)
    if not hasattr(device, "allocate_pinned"):
        raise ConfigError(
            f"device={device!r} is no backend: pass its name, one of {', '.join(USABLE)}, or what "
            "open_device answered"
        )
    return device
