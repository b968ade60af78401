"""The `cuda` backend: streams, memory, arrays, and the record of what went wrong.

Owns four streams: compute, d2h and h2d, which the worker knows, and `side`, on which followers
fetch ahead of their layers and which is joined before the step ends. Pools are `GpuMemory` and
`HostMemory`, whose addresses stay while their memory is given up; results of ops are torch's.

Device arrays are CuPy arrays or torch tensors; whatever has a ``__cuda_array_interface__`` is
taken. Work of the step path is queued, never waited for: `torch.cuda.set_sync_debug_mode("error")`
holds. Torch and CuPy are imported when a device is made. A device that is dropped, with a worker
that nobody shut down, waits for its work and gives its pools back when it is collected.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hisparse.device import backend
from hisparse.device.cuda.faults import FaultRecord
from hisparse.device.cuda.gpu_demand import GpuRoom
from hisparse.device.cuda.gpu_memory import GpuMemory
from hisparse.device.cuda.host_memory import HostMemory
from hisparse.device.cuda.kernels import require_cupy
from hisparse.device.cuda.movers import CudaKernels
from hisparse.device.cuda.pinned import pinned_memory, pinning
from hisparse.device.cuda.streams import CudaEvent, CudaStream
from hisparse.device.plan import Pending
from hisparse.errors import DeviceError, UsageError

TORCH_LEAST = 2, 11  # as pyproject.toml asks for; older ones were never run
WAIT_BYTES = 256 << 20  # a pool up to this size is pinned before it is handed out


class CudaDevice:
    """One GPU.

    Args:
        index: the device's number; None: torch's current one.

    Raises DeviceError, saying what is missing, without torch for CUDA, CuPy or a usable GPU, and
    for a torch that is built for ROCm or is older than `TORCH_LEAST`.
    """

    name = "cuda"

    def __init__(self, index: int | None = None) -> None:
        self.torch = require_torch()
        self.cupy = require_cupy()
        self.index = self.torch.cuda.current_device() if index is None else index
        self.torch.cuda.set_device(self.index)
        self.cupy.cuda.Device(self.index).use()
        attributes = self.cupy.cuda.Device(self.index).attributes
        self.shared_bytes = int(attributes["MaxSharedMemoryPerBlockOptin"])  # a block's, at most
        self._events = self._synchronizes = self.launches = self.copies = 0
        self.running: CudaStream
        self.compute = CudaStream(self, "compute")
        self.d2h = CudaStream(self, "d2h")
        self.h2d = CudaStream(self, "h2d")
        self.side = CudaStream(self, "side")
        self._streams = (self.compute, self.d2h, self.h2d, self.side)
        self.running = self.compute
        with self.compute.current():
            self.faults = FaultRecord(self)
        self.kernels = CudaKernels(self)
        self._pinned: dict[int, HostMemory] = {}  # by address
        self._allocated: dict[int, GpuMemory] = {}  # by address
        streams = [stream.torch for stream in self._streams]
        dropped = (streams, self._pinned, self._allocated)
        self._dropped = weakref.finalize(self, _give_back, *dropped)
        self._dropped.atexit = False  # of a process that ends the driver takes it

    # -- memory ----------------------------------------------------------------------------------
    def room(self, wanted_bytes: int) -> GpuRoom:
        """What is free. Where it is less than `wanted_bytes`, what CuPy holds for nobody is given
        back first."""
        cupy, cuda = self.cupy, self.torch.cuda
        if cupy.cuda.runtime.memGetInfo()[0] < wanted_bytes:
            cupy.get_default_memory_pool().free_all_blocks()
        free, total = cupy.cuda.runtime.memGetInfo()
        cached = cuda.memory_reserved(self.index) - cuda.memory_allocated(self.index)
        return GpuRoom(
            f"GPU {self.index} ({cuda.get_device_name(self.index)})", free, total, cached
        )

    def allocate(self, size_bytes: int, fill: int = 0) -> Any:
        cupy, memory = self.cupy, GpuMemory(size_bytes, self.index)
        self._allocated[memory.address] = memory
        owned = cupy.cuda.UnownedMemory(memory.address, size_bytes, memory, self.index)
        array = cupy.ndarray((size_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(owned, 0))
        self._fill(array, fill)
        return array

    def _fill(self, array: Any, fill: int) -> None:
        """Now, and waited for."""
        with self.compute.current():
            self.wipe(array, fill)
        self.compute.torch.synchronize()

    def allocate_table(self, rows: int, entries: int, guard: int = 0) -> Any:
        with self.compute.current():
            whole = self.cupy.zeros((rows, entries + guard), self.cupy.int32)
        return whole[:, :entries]

    def allocate_pinned(
        self, size_bytes: int, fill: int = 0, granule: int = 1, layer: int = 0
    ) -> Any:
        memory = pinned_memory(
            size_bytes, self.index, fill=fill, granule_bytes=granule, layer_bytes=layer
        )
        self._pinned[memory.address] = memory
        if size_bytes <= WAIT_BYTES:
            try:
                memory.wait()
            except BaseException:  # nobody gets what could be released
                self.release(memory.array)
                raise
        return memory.array

    def memory_of(self, array: npt.NDArray[np.uint8]) -> HostMemory:
        """What `allocate_pinned` gave `array` out of."""
        return self._pinned[array.ctypes.data]

    def discard(self, array: Any) -> None:
        if isinstance(array, np.ndarray):
            self.memory_of(array).discard()
        else:
            self._allocated[array.data.ptr].discard()

    def recommit(self, array: Any, fill: int = 0) -> None:
        if isinstance(array, np.ndarray):
            memory = self.memory_of(array)
            memory.recommit(fill)
            if memory.size_bytes <= WAIT_BYTES:
                try:
                    memory.wait()
                except BaseException:  # it may be tried again
                    memory.discard()
                    raise
        else:
            self._allocated[array.data.ptr].recommit()
            self._fill(array, fill)

    def release(self, array: Any) -> None:
        if isinstance(array, np.ndarray):
            memory = self.memory_of(array)
            memory.release()  # before it is forgotten: what is refused may be tried again
            del self._pinned[memory.address]
        else:
            self._allocated[array.data.ptr].release()
            del self._allocated[array.data.ptr]

    def give_back(self) -> None:
        """Release whatever is left, once what was queued has ended: nobody may use any of it."""
        self._dropped()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A torch tensor for an op's result: of the graph's own memory while one is captured."""
        return self.torch.empty(shape, dtype=dtype, device="cuda")

    # -- arrays ----------------------------------------------------------------------------------
    def adopt(self, array: Any) -> Any:
        """A CuPy array over the same memory. Host arrays are uploaded, in the order of compute."""
        cupy = self.cupy
        if isinstance(array, cupy.ndarray):
            return array
        if isinstance(array, self.torch.Tensor) and array.is_cuda:
            size = array.element_size()
            memory = cupy.cuda.UnownedMemory(
                array.data_ptr(), array.untyped_storage().nbytes(), array, self.index
            )
            return cupy.ndarray(
                tuple(array.shape),
                str(array.dtype).removeprefix("torch."),
                cupy.cuda.MemoryPointer(memory, 0),
                tuple(stride * size for stride in array.stride()),
            )
        if isinstance(array, self.torch.Tensor):
            array = array.numpy()
        if isinstance(array, np.ndarray):
            return self.upload(array)
        if hasattr(array, "__cuda_array_interface__"):
            return cupy.asarray(array)
        raise UsageError(f"{type(array).__name__}: pass a CuPy, torch or numpy array")

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """A copy on the device, queued on compute behind what was queued there so far."""
        with self.compute.current():
            names = {"uint64": "int64", "uint32": "int32"}  # torch has no such arithmetic
            name = names.get(array.dtype.name, array.dtype.name)
            made = self.adopt(self.empty(array.shape, getattr(self.torch, name)))
            self.copy(made.data.ptr, self.compute.staging.put(array), array.nbytes)
        return made

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Queue a copy between addresses of any kind on the current stream."""
        if size_bytes:
            runtime = self.cupy.cuda.runtime
            stream = self.cupy.cuda.get_current_stream().ptr
            runtime.memcpyAsync(target, source, size_bytes, runtime.memcpyDefault, stream)
            self.copies += 1

    def wipe(self, array: Any, value: int) -> None:
        """Queue one byte over all of a contiguous array on the current stream."""
        stream = self.cupy.cuda.get_current_stream().ptr
        self.cupy.cuda.runtime.memsetAsync(array.data.ptr, value, array.nbytes, stream)
        self.copies += 1

    def keep(self, array: Any) -> Any:
        """Stream order keeps it: whoever writes it again does so on compute, later."""
        return array

    def produce(self, op: Callable[[], Any]) -> Pending:
        pending = Pending(lambda: None)
        self.compute.enqueue(lambda: pending.produce(op))
        return pending

    def on_compute(self) -> AbstractContextManager[None]:
        return self.compute.current()

    # -- work ------------------------------------------------------------------------------------
    def next_event(self) -> int:
        self._events += 1
        return self._events

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        threads: int,
        arguments: tuple[Any, ...],
        shared_bytes: int = 0,
    ) -> None:
        """Queue a kernel on the current stream."""
        self.launches += 1
        kernel(grid, (threads,), arguments, shared_mem=shared_bytes)

    def query(self, event: backend.Event) -> bool:
        return bool(cast(CudaEvent, event).made.query())

    def synchronize(self, target: backend.Stream | backend.Event | None = None) -> None:
        """Block; then raise InvariantViolation for what the device found wrong by then, where it
        blocked for all of compute: else for what of it has come to the host."""
        self._synchronizes += 1
        if isinstance(target, CudaEvent):
            target.made.synchronize()
        elif isinstance(target, CudaStream) and target is not self.compute:
            target.torch.synchronize()
        else:
            # Side has fetches that a step left behind, as it failed midway.
            streams = (self.compute, self.side) if target else self._streams
            for stream in streams:
                stream.torch.synchronize()
            self.faults.check_now()
            return
        self.faults.check()

    def close_step(self) -> None:
        self.compute.enqueue(self.faults.copy_out)

    def check(self) -> None:
        self.faults.check()

    def statistics(self) -> dict[str, Any]:
        """Events made, kernels and copies that ops queued (replays of graphs are not seen here),
        synchronize calls, waits for room in the staging rings, bytes of pools, faults of all steps
        that it has told of (`faults.FaultRecord`), and how far the pinning of host pools is
        (`pinned.pinning`)."""
        told = pinning(self._pinned.values())
        gpu_bytes = sum(memory.size_bytes for memory in self._allocated.values())
        return {
            "events": self._events,
            "launches": self.launches,
            "copies": self.copies,
            "synchronizes": self._synchronizes,
            "staging_waits": sum(stream.staging.waits for stream in self._streams),
            "faults": dict(self.faults.counts),
            "lost_entries": self.faults.lost,
            "allocated_bytes": told["pinned_total_bytes"] + gpu_bytes,
            **told,
        }


def _give_back(
    streams: Sequence[Any], pinned: dict[int, HostMemory], allocated: dict[int, GpuMemory]
) -> None:
    """All memory of a device, once what it was given has ended. Raises DeviceError when all of it
    is through, with what each said."""
    if pinned or allocated:
        for stream in streams:
            stream.synchronize()
    errors = []
    for held in (pinned, allocated):
        while held:
            try:
                held.popitem()[1].release()
            except DeviceError as error:
                errors.append(str(error))
    if errors:
        raise DeviceError("; ".join(errors))


def require_torch() -> Any:
    """Torch for CUDA. Raises DeviceError that says what is missing."""
    try:
        import torch
    except ImportError:
        raise DeviceError(
            "the cuda backend needs torch: install 'hisparse[cuda12]' or 'hisparse[cuda13]'"
        ) from None
    if hip := getattr(torch.version, "hip", None):
        raise DeviceError(f"cuda: this torch is built for ROCm (torch.version.hip={hip}): refused")
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < TORCH_LEAST:
        least = ".".join(map(str, TORCH_LEAST))
        raise DeviceError(
            f"cuda: torch {torch.__version__} is older than {least}: install 'torch>={least}', as "
            "'hisparse[cuda12]' and 'hisparse[cuda13]' do"
        )
    if not torch.version.cuda:
        raise DeviceError(
            f"cuda: torch {torch.__version__} is a CPU build: install one that is built for CUDA "
            "(uninstall it, since 'hisparse[cuda12]' takes it for enough, then install that)"
        )
    if not torch.cuda.is_available():
        raise DeviceError("cuda: torch finds no usable GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES")
    return torch
