"""SuffixSource: who is asked for the indexer pages of a prefix that the GPU has lost.

Index blocks have no host tier: they are cached on the GPU and go when it is full, while the latent
pages of the same prefix live on in the host pool. The two prefixes then differ in length,

    host prefix       0 ................................................. host
    indexer prefix    0 ................ index
    asked for                            [index ......................... host)

and a source is asked for exactly the missing suffix, once, in the moment in which everything else
that the request needs is there. Its answer is an input event, so that a replay needs no source.
What it cannot serve shortens the prefix of every group. Without a source (None) the shorter prefix
is shared, and nothing here runs.

A source decides like everything on this side: it reads the state, yields events, does no I/O. One
that wraps a foreign store (vLLM's `OffloadingManager`: lookup, prepare_load, complete_load,
prepare_store, complete_store) keeps its own books of that store and answers through these verbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hisparse.errors import UsageError
from hisparse.fsm.events import AcknowledgementsTaken, SuffixAsked
from hisparse.fsm.state import Key, Request, State
from hisparse.kv.decision import I64, Decision


class SuffixSource(Protocol):
    """Stores indexer pages that are final, and brings them back."""

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of the leading pages `hashes` it can bring back now: 0..len(hashes).

        What it promises it keeps until the `load` that follows in the same call of the scheduler.
        """
        ...

    def load(self, row: int, first: int, end: int, cause: int) -> Decision[None]:
        """Plan copies of pages ``[first, end)`` of `row` into its index blocks, which it has.

        The worker orders them before the first compute that reads the blocks.
        """
        ...

    def store(self, row: int, first: int, end: int, cause: int) -> Decision[None]:
        """Entries ``[first, end)`` of the index table of `row` may be final by now: keep what is,
        once a hash. The blocks stay leased until the copies have settled."""
        ...

    def result(self, taken: AcknowledgementsTaken, cause: int) -> Decision[list[Key]]:
        """A rank's answers to loads and stores. Who read a failed load is rewound to the page of
        it (`kv.rewind`). Returns those for whom that was not possible, or not the policy: they have
        been preempted, and compute from the shorter prefix when they come back."""
        ...

    def drop(self, cause: int) -> Decision[None]:
        """Forget everything; nothing is in flight."""
        ...


def missing_suffix(state: State, request: Request, local: int) -> tuple[bytes, ...]:
    """Hashes of the pages that `request` finds on the host, beyond the `local` leading ones whose
    indexer rows the GPU has."""
    most = (request.prompt_tokens - 1) // state.page_size
    host = local
    while host < min(most, len(request.hashes)) and request.hashes[host] in state.prefix:
        host += 1
    return tuple(request.hashes[local:host])


def ask(state: State, source: SuffixSource, request: Request, local: int) -> Decision[None]:
    """Ask for exactly the indexer pages that the host prefix has and the GPU, which has `local`,
    lacks. Raises UsageError for an answer that cannot be."""
    missing = missing_suffix(state, request, local)
    if not missing:
        return
    found = source.lookup(missing)
    if not 0 <= found <= len(missing):
        raise UsageError(f"the suffix source found {found} of {len(missing)} pages")
    yield SuffixAsked(request.arrived_seq, *request.key, local, len(missing), found)


def promised_suffix(state: State, request: Request, local: int) -> int:
    """Pages beyond `local` that a source has promised to bring back."""
    first, found = state.suffix_answers.get(request.key, (local, 0))
    return found if first == local else 0


def store_sealed(
    state: State, source: SuffixSource, rows: I64, first: I64, cause: int
) -> Decision[None]:
    """Index blocks that pages from `first[i]` of `rows[i]` on have filled may be stored."""
    per_block = state.index_pages_per_block
    end = state.rows.computed[rows] // state.page_size // per_block
    starts = first // per_block
    for row, begin, stop in zip(rows.tolist(), starts.tolist(), end.tolist(), strict=True):
        yield from source.store(row, begin, stop, cause)
