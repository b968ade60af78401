"""The invariants, by name: what must hold, where each can be checked, and one small function each.

on      kind    what it looks at                         run by
log     state   the folded state, at any moment          `state.py`
log     run     an event against what the log said so far `run.py`
live    –       the scheduler beside its log or tables    `engine.verify`
device  –       bytes that were read                      worker, simulator
"""

from hisparse.fsm.invariants.checker import Checker, Violation
from hisparse.fsm.invariants.registry import INVARIANTS, Invariant

__all__ = ["INVARIANTS", "Checker", "Invariant", "Violation"]
