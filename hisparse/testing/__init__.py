"""Tests of hisparse, and for those who extend it: docs/fuzzing.md.

`HiSparseMachine` is here by name, and loaded when it is asked for: it needs hypothesis, the rest
of this package does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hisparse.testing.machine import HiSparseMachine

__all__ = ["HiSparseMachine"]


def __getattr__(name: str) -> Any:
    if name != "HiSparseMachine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hisparse.testing.machine import HiSparseMachine

    return HiSparseMachine
