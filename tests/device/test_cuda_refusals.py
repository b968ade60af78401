"""What the CUDA backend refuses when it is opened, and of the arrays of a step, and what the error
says: no GPU is needed."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hisparse.device import open_device
from hisparse.device.cuda.device import TORCH_LEAST, require_torch
from hisparse.device.cuda.kernels import require_cupy
from hisparse.device.cuda.movers import check_on_device
from hisparse.device.rows import StepRows
from hisparse.errors import DeviceError, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def torch(monkeypatch):
    """One that is built for CUDA and finds a GPU, as far as it says."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert require_torch() is torch
    return torch


def test_a_torch_that_is_built_for_rocm_is_refused_by_name(torch, monkeypatch):
    """Though it answers as one for CUDA does: its GPUs are `torch.cuda` too."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43484")
    with pytest.raises(DeviceError, match=r"built for ROCm \(torch.version.hip=6.4.43484\)"):
        open_device("cuda")


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ("2.10.1+cu128", True),
        ("1.13.0", True),
        ("2.9.0a0+gitabc.1", True),
        ("2.11.0+cu130", False),
        ("2.11", False),
        ("3.0.0rc1", False),
    ],
)
def test_a_torch_that_is_too_old_is_refused_with_the_one_to_install(
    version, refused, torch, monkeypatch
):
    monkeypatch.setattr(torch, "__version__", version)
    if not refused:
        assert require_torch() is torch
        return
    said = rf"torch {re.escape(version)} is older than 2\.11: install 'torch>=2\.11'"
    with pytest.raises(DeviceError, match=said):
        open_device("cuda")


def test_the_least_torch_is_the_one_that_the_package_asks_for():
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    least = ".".join(map(str, TORCH_LEAST))
    for extra in ("torch", "cuda12", "cuda13"):
        assert f"torch>={least}" in asked[extra]


@pytest.mark.parametrize("name", ["rocm", "hip"])
def test_rocm_is_no_backend(name):
    with pytest.raises(DeviceError, match=f"{name}: ROCm is refused"):
        open_device(name)


def test_a_torch_for_the_cpu_is_refused_with_its_version(torch, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    with pytest.raises(DeviceError, match=r"torch 2\.13\.0\+cpu is a CPU build: install one"):
        open_device("cuda")


def test_a_torch_that_finds_no_gpu_is_refused_with_where_to_look(torch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no usable GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES"):
        open_device("cuda")


@pytest.mark.parametrize("missing", ["torch", "cupy"])
def test_what_is_not_installed_is_named_with_the_extra_that_brings_it(torch, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(DeviceError, match=rf"(?i)needs {missing}: install 'hisparse\[cuda12\]'"):
        open_device("cuda")


class DriverError(Exception):
    """As CuPy raises it."""


def no_driver():
    raise DriverError("cudaErrorInsufficientDriver")


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (lambda: 0, "found no GPU: CUDA_VISIBLE_DEVICES may hide it"),
        (no_driver, "found no usable GPU: cudaErrorInsufficientDriver"),
    ],
)
def test_a_cupy_that_finds_no_gpu_is_refused(count, said, monkeypatch):
    runtime = SimpleNamespace(getDeviceCount=count, CUDARuntimeError=DriverError)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(DeviceError, match=said):
        require_cupy()


class OnDevice(np.ndarray):
    """As far as it says."""

    @property
    def __cuda_array_interface__(self):
        said = dict(self.__array_interface__)
        return said | {"strides": None if self.flags.c_contiguous else self.strides}


@pytest.mark.parametrize("name", ["rows", "positions"])
def test_step_rows_that_a_kernel_would_misread_are_refused(name):
    n, kinds = 3, {"rows": np.int32, "positions": np.int64}
    good = {key: np.zeros(n, kind).view(OnDevice) for key, kind in kinds.items()}
    check_on_device(StepRows(**good, span=1))
    kind = kinds[name]
    column, backwards = np.zeros((n, 2), kind)[:, 0], np.zeros(n, kind)[::-1]
    for gaps in (column, backwards, np.broadcast_to(kind(0), (n,))):
        with pytest.raises(UsageError, match=rf"span=1: {name} must be contiguous"):
            check_on_device(StepRows(**good | {name: gaps.view(OnDevice)}, span=1))
    for other in (np.zeros(n, kind), np.zeros(n, np.int16).view(OnDevice)):  # not there; not it
        with pytest.raises(UsageError, match=rf"{name} must be {kind.__name__} on the device"):
            check_on_device(StepRows(**good | {name: other}, span=1))
    check_on_device(
        StepRows(*(np.zeros((1, 2), k)[:, 0].view(OnDevice) for k in kinds.values()), 1)
    )
