"""`CallArena`: memory that the resolve calls of steps without a fixed shape are cut from.

A group takes an arena when it lays a call out and none of its calls is open, cuts all that it has
open from it, and gives it back when the last of them is closed: all that reads them is queued on
compute by then, or has been waited for there, so whoever cuts next, on compute, comes later. What
is cut holds what was there before, of any shape: its words of epochs are wiped by who cuts it.

Pure arithmetic but for slices of `memory`, which it does not own.
"""

from __future__ import annotations

from typing import Any

from hisparse.config import ceil_div
from hisparse.device.cuda.kernels import CALL_ALIGNMENT


class CallArena:
    """Args:
    memory: uint8 ``[bytes]`` on the device, initialised; its address is a multiple of
        `CALL_ALIGNMENT`.
    """

    def __init__(self, memory: Any) -> None:
        self._memory, self._used = memory, 0

    def cut(self, size_bytes: int) -> Any:
        """uint8 ``[size_bytes]`` behind all that was cut before; None where it does not fit."""
        end = self._used + ceil_div(size_bytes, CALL_ALIGNMENT) * CALL_ALIGNMENT
        if end > len(self._memory):
            return None
        made = self._memory[self._used : self._used + size_bytes]
        self._used = end
        return made

    def clear(self) -> None:
        """Nothing that was cut is open any more."""
        self._used = 0
