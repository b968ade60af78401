"""Hot rows: recorded selections through the production resolver, over a replay's tables. No torch.

The tables follow the replay's commands, as a worker's do, so that what is resident at a step is
what the variant decided; a position selects what it selected in the recorded run, whatever step
it is computed in now. Requests whose selections were not recorded are left out; so are positions
that only the variant computes, which `unknown_rows` counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hisparse.config import HiSparseConfig
from hisparse.device.cpu.forgetting import forget_entries
from hisparse.device.cpu.resolver import CpuResolver
from hisparse.device.cpu.streams import SimDevice
from hisparse.device.layout import Geometry
from hisparse.device.rows import StepRows
from hisparse.device.tables import DeviceTables
from hisparse.engine.selections import SelectionsTaken
from hisparse.engine.what_if.recording import Recording
from hisparse.errors import LogError
from hisparse.fsm.wire import SparseKVOffloadCommand

Chosen = npt.NDArray[np.int32]


class Counted(NamedTuple):
    """Selected positions, each once a row and index group."""

    resident: int
    hits: int
    misses: int


class RecordedSelections:
    """What each position of a request selected, by the request's number and index group.

    Args:
        recording: names the requests.
        taken: the recorded selections.
        config: what was recorded under.
        until_step: those of this step and later ones are left out (None: none are).
    """

    def __init__(
        self,
        recording: Recording,
        taken: Iterable[SelectionsTaken],
        config: HiSparseConfig,
        until_step: int | None,
    ) -> None:
        groups = config.layout.index_groups
        self.counted = Counted(0, 0, 0)
        self.host_rows_read = 0
        self._chosen: dict[tuple[int, int], Chosen] = {}
        self._known: dict[int, npt.NDArray[np.bool_]] = {}
        self._most = {request.number: request.max_tokens for request in recording.requests}
        for e in taken:
            number = recording.numbers.get((e.request, e.epoch))
            if number is None or (until_step is not None and e.step >= until_step):
                continue
            if not 0 <= e.group < len(groups):
                raise LogError(f"a selection of index group {e.group}: there are {len(groups)}")
            told = (e.resident, e.hits, e.misses)
            self.counted = Counted(*(a + b for a, b in zip(self.counted, told, strict=True)))
            self.host_rows_read += e.misses * len(groups[e.group])
            self._take(number, e)

    def _take(self, number: int, e: SelectionsTaken) -> None:
        most = self._most[number]
        chosen = np.frombuffer(e.selected, dtype="<i4").reshape(-1, e.top_k)
        chosen = chosen[: max(most - e.start, 0)]
        here = self._chosen.get((number, e.group))
        if here is None:
            here = self._chosen[number, e.group] = np.full((most, e.top_k), -1, dtype=np.int32)
        if here.shape[1] != e.top_k:
            raise LogError(f"selections of {e.request} have {here.shape[1]} and {e.top_k} rows")
        here[e.start : e.start + len(chosen)] = chosen
        known = self._known.setdefault(number, np.zeros(most, dtype=np.bool_))
        known[e.start : e.start + len(chosen)] = True

    @property
    def requests(self) -> int:
        """How many requests have any."""
        return len(self._known)

    def known(self, number: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these positions are recorded; none of a request that was not sampled."""
        here = self._known.get(number)
        return np.zeros(len(positions), dtype=np.bool_) if here is None else here[positions]

    def samples(self, number: int) -> bool:
        return number in self._known

    def of(self, number: int, group: int, positions: npt.NDArray[np.int64]) -> Chosen:
        """int32 ``[n, top_k]``"""
        return self._chosen[number, group][positions]


class HotRows:
    """The hot regions of one variant."""

    def __init__(self, config: HiSparseConfig, recorded: RecordedSelections) -> None:
        self._geometry = Geometry.of(config)
        self._recorded = recorded
        self._tables = DeviceTables(self._geometry, SimDevice())
        self._layers = config.layout.index_groups
        self._resolvers = [
            CpuResolver(self._geometry, self._tables, group[0]) for group in self._layers
        ]
        self.unknown_rows = 0

    def apply(self, command: SparseKVOffloadCommand) -> None:
        """Take over a command's tables, in the order that it promises."""
        if command.resets:
            for resolver in self._resolvers:
                resolver.forget_rows(command.resets)
            self._tables.reset(command.resets)
        for update in command.tables:
            gone = self._tables.apply(update)
            if gone.size:
                for resolver in self._resolvers:
                    forget_entries(resolver, update.table, update.row, gone)

    def resolve(self, step: int, rows: StepRows, numbers: dict[int, int]) -> None:
        """Resolve a step's rows. `numbers`: the number of the request in each request row."""
        parts = []
        for row in np.unique(rows.rows).tolist():
            at = np.flatnonzero(rows.rows == row)
            known = self._recorded.known(numbers[row], rows.positions[at])
            if self._recorded.samples(numbers[row]):
                self.unknown_rows += int(len(at) - np.count_nonzero(known))
            if known.any():
                parts.append((row, rows.positions[at[known]]))
        if not parts:
            return
        sizes = [len(positions) for _, positions in parts]
        request_rows = np.repeat(np.array([row for row, _ in parts], dtype=np.int32), sizes)
        here = StepRows(request_rows, np.concatenate([positions for _, positions in parts]))
        for group, resolver in enumerate(self._resolvers):
            chosen = [self._recorded.of(numbers[row], group, at) for row, at in parts]
            resolver.plan(here, np.concatenate(chosen).astype(np.int64), step)

    @property
    def counted(self) -> Counted:
        """Positions of all groups, each once a row."""
        told = [resolver.statistics() for resolver in self._resolvers]
        return Counted(*(sum(t[name] for t in told) for name in ("resident", "hits", "misses")))

    @property
    def host_rows_read(self) -> int:
        """Rows of all layers that were read from the host: a miss is read in each of its group."""
        told = zip(self._resolvers, self._layers, strict=True)
        return sum(resolver.misses * len(group) for resolver, group in told)
