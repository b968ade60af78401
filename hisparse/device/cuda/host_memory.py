"""`HostMemory`: one allocation of pinned host memory that the GPU reads at its host address.

Owns an anonymous mapping and its registrations. The mapping is registered with the driver in pieces
(a single registration has limits of its own: 512 GiB on R580), by background threads that fault a
piece's pages in, near the GPU, fill them, and register them. Nobody may touch a byte, from the CPU
or the GPU, before `ready`, `wait` or `wait_each` has said so of its interval, or `pinned` of all;
what is waited for comes next. Makes no events. Linux only.

    pinning -> pinned -> asleep -> pinning ... -> released;   pinning -> failed -> released

A piece that cannot be pinned fails the whole: what nobody was told to be ready is unpinned at once;
the rest, which work under way may be using, at `release`. Who waits gets the error; if nobody did,
`release` raises it, when all is given back. A registration that the driver will not end keeps its
pages and its addresses for good, since the device may still write there. Memory that is dropped
without `release` is unpinned all the same: a registration that outlived its pages would be in the
way of whoever gets their addresses next.
"""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hisparse.device.cuda import host_pages
from hisparse.device.cuda.host_pages import Placement
from hisparse.device.cuda.host_pieces import Piece, Pieces, Progress
from hisparse.device.cuda.host_register import Registrar, unpin
from hisparse.device.host_demand import suspects
from hisparse.device.host_limits import HostLimits, gib, read_limits
from hisparse.errors import DeviceError, UsageError

PIECE_BYTES = 256 << 20  # registering holds the process's mmap lock, 1 ms for 25 MiB
THREADS_MAX = 4

_kept: list[mmap.mmap] = []  # mappings that the driver would not let go


class HostMemory:
    """`size_bytes` of pinned memory; returns at once and pins in the background.

    Args:
        size_bytes: of the allocation; taken as it is, whole pages are mapped.
        registrar: what pins.
        fill: what every byte is at first.
        granule_bytes: bytes, from the start on, that no piece border falls into.
        layer_bytes: of each of the layers that it is made of, whose beginnings are pinned first; 0:
            it has none, and is pinned from its beginning on.
        piece_bytes: most bytes of a registration (one granule-and-page unit at least).
        threads: that pin, at most.
        placement: where pages should lie.
        on_progress: called on a pinning thread after each piece.
        limits: read when something fails, for the error's message.
        what: this memory's name in messages.

    Raises UsageError for sizes that make no sense, DeviceError if the mapping is refused.
    """

    def __init__(
        self,
        size_bytes: int,
        registrar: Registrar,
        *,
        fill: int = 0,
        granule_bytes: int = 1,
        layer_bytes: int = 0,
        piece_bytes: int = PIECE_BYTES,
        threads: int = THREADS_MAX,
        placement: Placement | None = None,
        on_progress: Callable[[Progress], object] | None = None,
        limits: Callable[[], HostLimits] = read_limits,
        what: str = "host pool",
    ) -> None:
        if min(size_bytes, granule_bytes, piece_bytes, threads) < 1 or not 0 <= fill < 256:
            raise UsageError(
                f"HostMemory({size_bytes=}, {granule_bytes=}, {piece_bytes=}, {threads=}, {fill=}):"
                " sizes and threads are at least 1, fill a byte"
            )
        self.size_bytes, self.what = size_bytes, what
        self._registrar, self._limits, self._on_progress = registrar, limits, on_progress
        self._placement, self._threads_max = placement or Placement(), threads
        self._pieces = Pieces(size_bytes, piece_bytes, granule_bytes, what, layer_bytes)
        mapped = self._pieces.mapped_bytes
        try:
            self._map = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise DeviceError(
                f"{what}: {gib(mapped)} could not be mapped: {error.strerror}; "
                f"{suspects(limits(), mapped)}"
            ) from error
        host_pages.advise(self._map)
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._state = "asleep"
        self._error: DeviceError | None = None
        self._heard = True  # by somebody, of the error
        dropped = (registrar, self._pieces, self.address, self._map)
        self._dropped = weakref.finalize(self, _unpin_dropped, *dropped)
        self._dropped.atexit = False  # a process that ends is unpinned by the driver
        self.recommit(fill)

    # -- what a user asks --------------------------------------------------------------------------
    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """uint8 ``[size_bytes]``, the memory itself."""
        if self._bytes is None:
            raise UsageError(f"{self.what}: released")
        return self._bytes[: self.size_bytes]

    @property
    def pinned(self) -> bool:
        """Whether all of it is pinned and filled; takes no lock and never raises."""
        return self._state == "pinned"

    def ready(self, offset: int = 0, size: int | None = None) -> bool:
        """Whether bytes ``[offset, offset + size)`` (to the end, if None) are pinned and filled.

        Raises DeviceError if pinning failed, UsageError asleep, released or out of bounds.
        """
        with self._changed:
            return self._ready(self._pieces.covering(offset, size))

    def wait(self, offset: int = 0, size: int | None = None) -> None:
        """Block until `ready`; pieces of the interval are taken up next. Raises as `ready` does."""
        with self._changed:
            self._wait(self._pieces.covering(offset, size))

    def wait_each(self, offsets: npt.NDArray[np.int64], size: int) -> None:
        """`wait` for the `size` bytes, a granule at most, at each of `offsets` (one at least)."""
        with self._changed:
            self._wait(self._pieces.holding(offsets, size))

    def wait_pinned(self, size_bytes: int) -> None:
        """Block until so many bytes are pinned, whichever come first. Raises as `ready` does."""
        with self._changed:
            while self._state == "pinning" and (
                self._error is not None or self._pieces.registered_bytes < size_bytes
            ):
                self._changed.wait()
            self._ready(())

    def pieces(self, offset: int, size: int) -> list[tuple[int, int]]:
        """The interval, cut at the borders of registrations: (offset, size) of each part."""
        return self._pieces.cut(offset, size)

    def progress(self) -> Progress:
        with self._changed:
            end = time.monotonic() if self._state == "pinning" else self._ended
            return Progress(
                registered_bytes=self._pieces.registered_bytes,
                total_bytes=self.size_bytes,
                elapsed_s=end - self._began,
                state=self._state,
                placement=self._placement.why + (f" ({self._refused})" if self._refused else ""),
                local_share=self._local,
            )

    # -- sleep and teardown; nothing queued may touch the memory any more --------------------------
    def discard(self) -> None:
        """Unpin everything and give the pages back; the addresses stay. Waits for the threads.

        Raises DeviceError that names each piece that the driver would not unregister; such pieces
        stay as they are, and the call may be repeated.
        """
        if self._state == "released":
            raise UsageError(f"{self.what}: released")
        self._stopping = True
        for thread in self._threads:
            thread.join()
        try:
            unpin(self._registrar, self._pieces, self._pieces.all, self.address, self._map)
        except DeviceError as error:
            self._error, self._state, self._heard = error, "failed", True
            raise
        with self._changed:
            self._state = "asleep"
            self._changed.notify_all()

    def recommit(self, fill: int = 0) -> None:
        """Memory behind the addresses of a discarded allocation, pinned as at first."""
        if self._state != "asleep":
            raise UsageError(f"{self.what}: recommit of memory that is {self._state}")
        self._refused: str | None = None
        if self._placement.node is not None:
            self._refused = host_pages.bind(self.address, len(self._map), self._placement.node)
        self._local: float | None = None
        self._began = self._ended = time.monotonic()
        self._state, self._stopping, self._error = "pinning", False, None
        self._running = min(self._threads_max, len(self._pieces))
        self._threads = [
            threading.Thread(target=self._pin, args=(fill,), name=f"pin {self.what}", daemon=True)
            for _ in range(self._running)
        ]
        for thread in self._threads:
            thread.start()

    def release(self) -> None:
        """Unpin, give the pages back, and unmap once no view is left. A second call does nothing.

        Raises DeviceError as `discard` does; the mapping of such a piece is never given up. Raises
        it too, with all given back, where pinning had failed and nobody was told.
        """
        if self._state == "released":
            return
        try:
            self.discard()
        except DeviceError:
            if not any(kept is self._map for kept in _kept):
                _kept.append(self._map)
            raise
        _kept[:] = [kept for kept in _kept if kept is not self._map]
        self._dropped.detach()
        self._state, self._bytes = "released", None
        del self._map
        if self._error is not None and not self._heard:
            raise self._error

    # -- pinning -----------------------------------------------------------------------------------
    def _wait(self, pieces: Sequence[Piece]) -> None:
        """The lock is held."""
        self._pieces.want(pieces)
        while not self._ready(pieces):
            self._changed.wait()

    def _ready(self, pieces: Sequence[Piece]) -> bool:
        """The lock is held."""
        if self._state == "pinned":
            return True
        if self._state == "failed":
            self._heard = True
            raise DeviceError(str(self._error)) from self._error
        if self._state != "pinning":
            raise UsageError(f"{self.what}: it is {self._state}, nothing of it is pinned")
        if self._error is not None or any(piece.state != "registered" for piece in pieces):
            return False  # with an error: not before the unwinding is over
        for piece in pieces:
            piece.told = True
        return True

    def _pin(self, fill: int) -> None:
        """A pinning thread: pieces one after the other, until none is left or one fails."""
        try:
            host_pages.run_on(self._placement.cpus)
            while (piece := self._take()) is not None:
                self._pin_piece(piece, fill)
                if self._on_progress is not None:
                    self._on_progress(self.progress())
        except Exception as error:
            with self._changed:
                if not isinstance(error, DeviceError):
                    error = self._failed(f"pinning stopped: {error!r}")
                self._error, self._heard = self._error or error, False
        finally:
            self._leave()

    def _take(self) -> Piece | None:
        with self._changed:
            stopped = self._error is not None or self._stopping
            return None if stopped else self._pieces.take()

    def _pin_piece(self, piece: Piece, fill: int) -> None:
        assert self._bytes is not None
        address, part = self.address + piece.offset, self._bytes[piece.offset : piece.end]
        state = "absent"
        try:
            host_pages.populate(address, piece.size, part)
            if fill:
                part[:] = fill
            self._registrar.register(address, piece.size)
            state = "registered"
        except DeviceError as error:
            raise self._failed(f"{self._pieces.told(piece)} not pinned: {error}") from error
        finally:
            with self._changed:
                piece.state = state
                self._changed.notify_all()

    def _failed(self, reason: str) -> DeviceError:
        """The error that everybody gets who asks for this memory."""
        done = self._pieces.registered_bytes
        pinned = f"{gib(done)} of {gib(self.size_bytes)} had been pinned"
        short = suspects(self._limits(), self.size_bytes - done)
        return DeviceError(f"{self.what}: {reason}; {pinned}; {short}")

    def _leave(self) -> None:
        """The last thread out settles how pinning ended."""
        with self._changed:
            self._running -= 1
            if self._running:
                return
            error, complete = self._error, self._pieces.complete
            unused = [piece for piece in self._pieces if not piece.told]
        if error is not None:
            try:
                unpin(self._registrar, self._pieces, unused, self.address, self._map)
            except DeviceError as also:
                self._error = DeviceError(f"{error}; unwinding: {also}")
        elif complete and self._placement.node is not None:
            node = self._placement.node
            self._local = host_pages.share_on(self.address, len(self._map), node)
        with self._changed:
            self._ended = time.monotonic()
            if error is not None or complete:
                self._state = "pinned" if error is None else "failed"
            self._changed.notify_all()


def _unpin_dropped(registrar: Registrar, pieces: Pieces, address: int, memory: mmap.mmap) -> None:
    try:
        unpin(registrar, pieces, pieces.all, address, memory)
    except DeviceError:
        _kept.append(memory)  # there is nobody to tell
