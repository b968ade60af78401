"""What the CUDA backend refuses when it is opened, and what the error says: no GPU is needed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from hisparse.device import open_device
from hisparse.device.cuda.device import require_torch
from hisparse.device.cuda.kernels import require_cupy
from hisparse.errors import DeviceError


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
