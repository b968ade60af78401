"""projection: what both sides of a comparison see of a state, as named lists of small numbers.

A place is a table entry of a request that held a block or a host page when the world was taken up;
requests, places and host pages are numbered once, and stay so. What is left out: indexer and hot
blocks, queues' orders, epochs, seqs.

    request    state, hot region, pages published, rows confirmed, copies unsettled, pages reserved
    place      block state, held by its entry, host page that it pairs with; host page of its entry;
               copy: kind + 1, state, masks of ranks, block still held, ranks told; all 0: none
    host page  state, references            content    found by prefix
    rank       last step retired; said and not heard yet: masks of places, steps; lost
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparse.fsm.machines import RequestState
from hisparse.fsm.state import Key, State
from hisparse.fsm.wire import AckKind, Table
from hisparse.testing.explore.branch import RETIRED, Branch
from hisparse.testing.explore.offers import Said
from hisparse.testing.explore.prepared import Prepared
from hisparse.testing.explore.search import Search

Fields = dict[str, list[int]]
GONE = int(RequestState.GONE)
COPY = ("kind", "copy", "enq", "done", "holds", "told")  # of a place with a copy in flight


@dataclass(frozen=True)
class Place:
    """Entry `entry` of request number `owner`, and its block at the beginning (0: none)."""

    owner: int
    entry: int
    block: int


class Projection:
    """Of states that come of `prepared`, and the numbers that stay the same in all of them."""

    def __init__(self, prepared: Prepared) -> None:
        state = prepared.branch.state
        self.prepared, self.world = prepared, prepared.world
        self.requests: list[Key] = list(state.requests)
        self.rows = [request.row for request in state.requests.values()]
        resident, host = state.table(Table.RESIDENT), state.table(Table.HOST)
        self.places = [
            Place(owner, entry, int(resident[row, entry]))
            for owner, row in enumerate(self.rows)
            for entry in range(resident.shape[1] if row >= 0 else 0)
            if resident[row, entry] or host[row, entry]
        ]
        self.place_at = {(p.owner, p.entry): k for k, p in enumerate(self.places)}
        hashes = [request.hashes for request in state.requests.values()]
        named = [hashes[p.owner][p.entry : p.entry + 1] for p in self.places]
        self.contents = list(dict.fromkeys(one for names in named for one in names))
        self.content = [self.contents.index(names[0]) if names else -1 for names in named]
        self.pages = len(state.pages.state)

    def count(self, search: Search) -> int:
        """Different projected states among all that `search` visited."""
        branches = search.schedulers.branches
        of_scheduler = [tuple(map(tuple, self._scheduler(b).values())) for b in branches]
        seen = set()
        for number, said, crashes, failures in search.places:
            words = tuple(map(tuple, self._said(branches[number].state, said).values()))
            seen.add((of_scheduler[number], words, crashes, failures))
        return len(seen)

    def of_start(self) -> Fields:
        """The state that the comparison begins in."""
        branch = self.prepared.branch
        said: tuple[Said, ...] = ((),) * self.world.ranks
        return {
            **self._scheduler(branch),
            **self._said(branch.state, said),
            "crashes": [0],
            "failures": [0],
        }

    def _scheduler(self, branch: Branch) -> Fields:
        state = branch.state
        return {
            **self._requests(state),
            **self._places(state),
            **self._copies(branch),
            "page": state.pages.state.tolist(),
            "refs": state.pages.refs.tolist(),
            "found": [int(content in state.prefix) for content in self.contents],
            "retired": list(state.retired),
            "lost": [state.lost],
        }

    def _requests(self, state: State) -> Fields:
        width = self.world.pages
        found: Fields = {
            name: [0] * len(self.requests)
            for name in ("q", "hot", "published", "confirmed", "unsettled", "promised")
        }
        found["reserved"] = [0] * (len(self.requests) * width)
        for at, (key, row) in enumerate(zip(self.requests, self.rows, strict=True)):
            request = state.requests.get(key)
            found["q"][at] = GONE if request is None else int(request.state)
            if request is None or row < 0:
                continue
            found["hot"][at] = int(request.hot)
            for name in ("published", "confirmed", "unsettled"):
                found[name][at] = int(getattr(state.rows, name)[row])
            found["promised"][at] = len(request.reserved)
            found["reserved"][at * width : at * width + len(request.reserved)] = request.reserved
        return found

    def _places(self, state: State) -> Fields:
        blocks, pages = state.blocks, state.pages
        found: Fields = {"block": [], "held": [], "pair": [], "host": []}
        for place in self.places:
            block, owner = place.block, self.requests[place.owner]
            gone, row = owner not in state.requests, self.rows[place.owner]
            page = int(blocks.partner[block])
            linked = block and pages.partner[page] == block
            entry = 0 if gone else int(state.table(Table.RESIDENT)[row, place.entry])
            found["block"].append(int(blocks.state[block]))
            found["held"].append(int(entry > 0))
            found["pair"].append(page if linked else 0)
            found["host"].append(0 if gone else int(state.table(Table.HOST)[row, place.entry]))
        return found

    def _copies(self, branch: Branch) -> Fields:
        state, found = branch.state, {name: [0] * len(self.places) for name in COPY}
        for t in state.transfers.values():
            told = t.transfer < branch.told.commanded
            values = (t.kind + 1, t.state, t.enqueued, t.completed, t.holds_block, told)
            for name, value in zip(COPY, values, strict=True):
                found[name][self.place_of(state, t.transfer)] = int(value)
        return found

    def place_of(self, state: State, transfer: int) -> int:
        """The place that a copy in flight is of."""
        t = state.transfers[transfer]
        return self.place_at[self.rows.index(t.row), t.entry]

    def _said(self, state: State, said: tuple[Said, ...]) -> Fields:
        transfers, ranks = list(state.transfers), range(self.world.ranks)
        found: Fields = {f"said_{name}": [0 for _ in ranks] for name in ("e", "c", "f", "r")}
        names = {AckKind.ENQUEUED: "said_e", AckKind.COMPLETED: "said_c", AckKind.FAILED: "said_f"}
        for rank, words in enumerate(said):
            for kind, number in words:
                if kind == RETIRED:
                    found["said_r"][rank] += 1
                else:
                    place = self.place_of(state, transfers[number])
                    found[names[AckKind(kind)]][rank] |= 1 << place
        return found
