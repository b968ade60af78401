"""What a residency policy is, and all that it sees.

Holds at its edges: a view cannot be written through (its arrays refuse), and an answer that the
promises do not allow raises PolicyError with the policy, the row and the bound; with checks on,
each question is asked twice, and two answers that differ raise too. Whatever a policy raises, or
answers that is no number, is a PolicyError that names policy, method, file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from operator import index
from reprlib import repr as shortened
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hisparse.errors import PolicyError
from hisparse.fsm.state import State
from hisparse.kv.budget import excess_pages, spare

I64 = npt.NDArray[np.int64]
Answer = TypeVar("Answer")


def _frozen(values: npt.ArrayLike) -> I64:
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array


class PolicyView:
    """The scheduler's state as a policy may see it: numbers, and int64 ``[rows]`` arrays that
    refuse to be written. A row that is not `live` has nothing to decide about.
    """

    def __init__(self, state: State, resource: str) -> None:
        self._state = state
        self.resource = resource  # who asks: "watermark", "growth", "admission" or "promotion"

    @property
    def step(self) -> int:
        """Number of the last planned step."""
        return self._state.step

    @cached_property
    def spare(self) -> int:
        """GPU blocks that are neither in use nor promised."""
        return spare(self._state)

    @cached_property
    def live(self) -> npt.NDArray[np.bool_]:
        """bool ``[rows]``: rows whose request is admitted and has not ended."""
        found = self._state.rows.live.copy()
        found.flags.writeable = False
        return found

    @cached_property
    def excess(self) -> I64:
        """Resident pages above the window: the most that a row may lose."""
        return _frozen(excess_pages(self._state))

    @cached_property
    def resident(self) -> I64:
        """Resident pages."""
        return _frozen(self._state.rows.resident)

    @cached_property
    def on_host(self) -> I64:
        """Pages that are read from the host."""
        rows = self._state.rows
        return _frozen(np.where(rows.live, rows.pages - rows.resident, 0))

    @cached_property
    def pages_max(self) -> I64:
        """Pages of the request at its longest."""
        return _frozen(self._state.rows.pages_max)

    @cached_property
    def computed(self) -> I64:
        """KV rows that are computed and accepted."""
        return _frozen(self._state.rows.computed)

    @cached_property
    def last_step(self) -> I64:
        """The last step that computed rows of the request; 0: none yet."""
        return _frozen(self._state.rows.last_step)

    @cached_property
    def arrived_seq(self) -> I64:
        """Seq of the request's arrival; 0 for a row that is not in use."""
        return _frozen([0 if q is None else q.arrived_seq for q in self._state.by_row])


class ResidencyPolicy(Protocol):
    """Ranks requests. Deterministic, without state of its own, and made without arguments.

    Subclass `Hybrid` to change one answer and keep the others.
    """

    choice: str  # what `victims` does, in a word; logged with each of its choices
    host_first: bool  # lease hot regions at once, and let pages leave as soon as they are sealed

    def victims(self, view: PolicyView, need: int) -> Sequence[tuple[int, int]]:
        """(row, pages) pairs: who loses up to how many pages, in this order, until `need` blocks
        are found. Pages of one row may add up to `view.excess` of it and no further; which of its
        pages go is not the policy's business (sealed ones, oldest first).
        """
        ...

    def promotions(self, view: PolicyView) -> Sequence[int]:
        """Rows whose host pages come back when there is room for a whole request, in this order;
        a row that is left out stays as it is."""
        ...


def ask_victims(
    policy: ResidencyPolicy, state: State, need: int, resource: str
) -> Sequence[tuple[int, int]]:
    """The policy's answer, checked against the promises. Raises PolicyError."""
    view = PolicyView(state, resource)
    found = _ask(policy, state, "victims", (view, need), _pair)
    left = view.excess.tolist()
    for row, pages in found:
        if not 0 <= row < len(left) or not 0 <= pages <= left[row]:
            bound = left[row] if 0 <= row < len(left) else "no such row"
            raise PolicyError(
                f"policy {type(policy).__name__}: victims() takes {pages} pages of row {row}, "
                f"allowed are {bound}: stay within view.excess"
            )
        left[row] -= pages
    return found


def ask_promotions(policy: ResidencyPolicy, state: State) -> Sequence[int]:
    """The policy's answer, each row once and live. Raises PolicyError."""
    view = PolicyView(state, "promotion")
    found = _ask(policy, state, "promotions", (view,), index)
    for row in found:
        if not 0 <= row < len(view.live) or not view.live[row] or found.count(row) > 1:
            raise PolicyError(
                f"policy {type(policy).__name__}: promotions() names row {row} "
                f"{found.count(row)} times; name each live row at most once"
            )
    return found


def _pair(answer: Any) -> tuple[int, int]:
    row, pages = answer
    return index(row), index(pages)


WANTED = {"victims": "(row, pages) pairs of ints", "promotions": "rows, which are ints"}


def _ask(
    policy: ResidencyPolicy,
    state: State,
    method: str,
    given: tuple[Any, ...],
    read: Callable[[Any], Answer],
) -> list[Answer]:
    answer = _answer(policy, method, given, read)
    if state.config.checks == "on" and (again := _answer(policy, method, given, read)) != answer:
        raise PolicyError(
            f"policy {type(policy).__name__} answered {answer}, then {again} to the same question: "
            "a policy decides from its view alone"
        )
    return answer


def _answer(
    policy: ResidencyPolicy, method: str, given: tuple[Any, ...], read: Callable[[Any], Answer]
) -> list[Answer]:
    """What the policy says, as ints. Raises PolicyError from whatever it raised."""
    told = f"policy {type(policy).__name__}: {method}()"
    try:
        answer = getattr(policy, method)(*given)
        items = list(answer) if isinstance(answer, Iterable) else None  # it may be a generator
    except Exception as error:
        place = _raised_at(error) or _defined_at(policy, method)
        raise PolicyError(f"{told} raised {type(error).__name__}: {error}{place}") from error
    place = _defined_at(policy, method)
    if items is None:
        raise PolicyError(
            f"{told} returned {shortened(answer)}, which is no sequence{place}: return "
            f"{WANTED[method]}, or () for nothing"
        )
    found = []
    for item in items:
        try:
            found.append(read(item))
        except (TypeError, ValueError) as error:
            raise PolicyError(
                f"{told} returned {shortened(item)} among its answers{place}: return "
                f"{WANTED[method]}"
            ) from error
    return found


def _raised_at(error: Exception) -> str:
    """The innermost line of the file that was called, as `` (file.py:12)``: what that file gave to
    numpy or to the view is its own doing. Empty if the call did not get as far as that file."""
    at = error.__traceback__ and error.__traceback__.tb_next
    if at is None:
        return ""
    file, line = at.tb_frame.f_code.co_filename, at.tb_lineno
    while at is not None:
        if at.tb_frame.f_code.co_filename == file:
            line = at.tb_lineno
        at = at.tb_next
    return _place(file, line)


def _defined_at(policy: ResidencyPolicy, method: str) -> str:
    code = getattr(getattr(policy, method), "__code__", None)
    return "" if code is None else _place(code.co_filename, code.co_firstlineno)


def _place(file: str, line: int) -> str:
    return f" ({file.rpartition('/')[2]}:{line})"
