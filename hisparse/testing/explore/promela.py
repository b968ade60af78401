"""promela: a prepared world as a model for Spin, of the compiled tables and of declared guards.

Every move in the model is a look-up in a table that is printed from `Machine.table` as it is at the
moment of the export. What decides which trigger is applied when is written down a second time, in
`model.pml`: `GUARDS` says which decisions, and nothing else is in the model. Its variables are the
fields of `projection` and, functions of these, which queue an id is in and whether a page is whole.
So the states that Spin stores are to be as many as the projected states that exploring the
production code meets, and it is to find an invariant violated where that does.
"""

from __future__ import annotations

import enum
from importlib import resources

from hisparse.errors import UsageError
from hisparse.fsm.machine import ILLEGAL, Machine
from hisparse.fsm.machines import (
    BLOCK_LEASE,
    HOST_PAGE,
    HOT_REGION,
    LIVE,
    REQUEST,
    TRANSFER,
    BlockState,
    PageState,
    RequestState,
)
from hisparse.fsm.wire import TransferKind
from hisparse.testing.explore.prepared import Prepared
from hisparse.testing.explore.projection import Projection
from hisparse.testing.explore.world import PAGE_ROWS

TABLES = (REQUEST, HOT_REGION, BLOCK_LEASE, HOST_PAGE, TRANSFER)
PLACES_MAX = 8  # bits of a byte
NONE = 255
_PHASES = {RequestState.WAITING: 0, RequestState.DRAINING: 2}  # all others are live
COMMAND = "spin -a {model} && gcc -DSAFETY -DNOREDUCE -o pan pan.c && ./pan -m100000 -w20"
GUARDS = (
    "quorum: which of _partial and _last, by the masks of ranks; COMPLETED implies ENQUEUED",
    "a copy that failed: worthless at once, over when all ranks answered, its page reserved anew",
    "a spill that every rank has enqueued: the block goes",
    "publication: the gap-free prefix of durable, confirmed pages; one page a content",
    "ends: what is sealed and dirty is written back, the rest is given back by its block's state",
    "drain: forgotten when no copy is in flight and all ranks retired the last step that reads",
    "a lost rank: all are preempted, what it did not acknowledge has failed",
    "best fit of one host page",
)
INVARIANTS = (
    "IllegalTransition",
    "spill_before_free",
    "complete_before_publish",
    "host_reuse_after_readers",
    "conservation",
    "always_readable",
    "AssertionError",
)
LEFT_OUT = "arrivals, admission, steps planned and computed, rewinding, promotion, indexer blocks"


def promela(prepared: Prepared) -> str:
    """The model, ready for `spin -a`. Raises UsageError for a world with more than 8 places."""
    projection = Projection(prepared)
    if not 0 < len(projection.places) <= PLACES_MAX:
        raise UsageError(
            f"this world has {len(projection.places)} table entries in use; a model holds 1 to "
            f"{PLACES_MAX}: use fewer --requests or --pages"
        )
    guards = resources.files(__package__).joinpath("model.pml").read_text(encoding="utf-8")
    parts = [
        _header(prepared),
        *[_table(machine) for machine in TABLES],
        _sizes(prepared, projection),
        _variables(projection),
        guards,
        _moves(prepared, projection),
    ]
    return "\n".join(parts)


def declared(prepared: Prepared) -> list[str]:
    """What world, projection, guards and invariants the model is of, in lines."""
    world, state = prepared.world, prepared.branch.state
    copies = ", ".join(
        f"{t.kind.name} of entry {t.entry} of row {t.row} (block {t.block}, host page {t.page})"
        for t in state.transfers.values()
    )
    requests = ", ".join(f"{q.request} {q.state.name}" for q in state.requests.values())
    return [
        f"world: {world.ranks} ranks; {requests}; in flight: {copies}",
        f"faults: {world.faults} of {world.crashes} crashes and {world.failures} failed copies",
        f"reached by: {len(prepared.start)} inputs from an empty log",
        "moves: ranks say and are heard; requests finish, are aborted, preempted; a rank is lost",
        "tables: " + ", ".join(machine.name for machine in TABLES),
        *[f"guard: {guard}" for guard in GUARDS],
        "invariants: " + ", ".join(INVARIANTS),
        "projection: as in hisparse.testing.explore.projection",
        f"left out: {LEFT_OUT}",
    ]


def _header(prepared: Prepared) -> str:
    lines = ["hisparse explore --to promela", *declared(prepared)]
    lines.append("run: " + COMMAND.format(model="FILE"))
    return "/*\n" + "\n".join(f" * {line}" for line in lines) + "\n */\n"


def _define(name: str, value: object) -> str:
    return f"#define {name} {value}"


def _array(kind: str, name: str, values: list[int]) -> str:
    return f"{kind} {name}[{len(values) or 1}] = {{{', '.join(map(str, values or [0]))}}};"


def _table(machine: Machine) -> str:
    """Names of states and triggers, and the compiled table: a row a state."""
    lines = [f"/* {machine.name} */"]
    members: tuple[type[enum.IntEnum], ...] = (machine.states, machine.triggers)
    lines += [_define(f"{machine.name}_{m.name}", int(m)) for kind in members for m in kind]
    width = len(machine.triggers)
    lines.append(_define(f"{machine.name}_next(s, how)", f"{machine.name}[(s) * {width} + (how)]"))
    rows = [", ".join(str(int(cell)) for cell in row) for row in machine.table]
    body = ",\n  ".join(rows)
    lines.append(f"hidden byte {machine.name}[{machine.table.size}] = {{\n  {body}\n}};\n")
    return "\n".join(lines)


def _sizes(prepared: Prepared, projection: Projection) -> str:
    world, state, told = prepared.world, prepared.branch.state, prepared.branch.told
    rows, places, width = state.rows, projection.places, world.pages
    requests = len(projection.requests)
    waited = [0] * len(places)
    for transfer, step in told.waited.items():
        waited[projection.place_of(state, transfer)] = step
    of_row = [row if row >= 0 else None for row in projection.rows]
    at = [projection.place_at.get((i, e), NONE) for i in range(requests) for e in range(width)]
    computed = [0 if row is None else int(rows.computed[row]) for row in of_row]
    live = " || ".join(f"(s) == {REQUEST.name}_{one.name}" for one in LIVE)
    content = [NONE if one < 0 else one for one in projection.content]
    return "\n".join(
        [
            "/* What stays the same in this world. */",
            _define("ILLEGAL", ILLEGAL),
            _define("NONE", NONE),
            *[_define(kind.name, kind + 1) for kind in TransferKind],
            _define("LIVE(s)", f"({live})"),
            _define("REQUESTS", requests),
            _define("PLACES", len(places)),
            _define("PAGES", projection.pages - 1),
            _define("WIDTH", width),
            _define("PAGE_ROWS", PAGE_ROWS),
            _define("N_RANKS", world.ranks),
            _define("RANKS", (1 << world.ranks) - 1),
            _define("STEP", state.step),
            _define("FAULTS", world.faults),
            _define("CRASHES", world.crashes),
            _define("FAILURES", world.failures),
            *[f"hidden byte {name} = 1;" for name in INVARIANTS],
            _array("hidden byte", "admitted", [int(row is not None) for row in of_row]),
            _array("hidden byte", "rows_computed", computed),
            _array(
                "hidden byte",
                "last_step",
                [0 if row is None else int(rows.last_step[row]) for row in of_row],
            ),
            _array("hidden byte", "place_at", at),
            _array("hidden byte", "owner", [p.owner for p in places]),
            _array("hidden byte", "content", content),
            _array("hidden byte", "waited", waited),
            _array(
                "hidden byte",
                "computed",
                [int(p.entry * PAGE_ROWS < computed[p.owner]) for p in places],
            ),
            _array(
                "hidden byte",
                "sealed",
                [int((p.entry + 1) * PAGE_ROWS <= computed[p.owner]) for p in places],
            ),
            "",
        ]
    )


def _variables(projection: Projection) -> str:
    fields = projection.of_start()
    lines = ["/* The projection, as it is at the beginning. */"]
    for name, values in fields.items():
        single = name in ("lost", "crashes", "failures")
        lines.append(f"byte {name} = {values[0]};" if single else _array("byte", name, values))
    queue = {BlockState.FREE: 1, BlockState.CACHED: 2}
    pages = list(zip(fields["page"], fields["refs"], strict=True))
    whole = (PageState.COMPLETED, PageState.PUBLISHED)
    idle = [
        1 if state == PageState.FREE else 2 if state == PageState.PUBLISHED and not refs else 0
        for state, refs in pages
    ]
    lines += [
        "/* Functions of it. */",
        _array("byte", "phase", [_PHASES.get(RequestState(q), 1) for q in fields["q"]]),
        _array("byte", "block_in", [queue.get(BlockState(s), 0) for s in fields["block"]]),
        _array("byte", "page_in", idle),
        _array("byte", "whole", [int(state in whole) for state, _ in pages]),
        "",
    ]
    return "\n".join(lines)


def _moves(prepared: Prepared, projection: Projection) -> str:
    """The process: one indivisible step a move, chosen freely among those that may be."""
    moves = []
    for r in range(prepared.world.ranks):
        for k in range(len(projection.places)):
            says = f"SAYS({r}, {k})"
            unsaid = f"!WORD(enq[{k}], {r}) && !WORD(said_e[{r}], {k})"
            moves += [
                (f"{says} && {unsaid}", f"said_e[{r}] = said_e[{r}] | {1 << k}; what = SAY"),
                (says, f"said_c[{r}] = said_c[{r}] | {1 << k}; what = SAY"),
                (
                    f"{says} && MAY_FAIL",
                    f"said_f[{r}] = said_f[{r}] | {1 << k}; failures++; what = SAY",
                ),
            ]
        moves += [
            (f"!WORD(lost, {r}) && retired[{r}] + said_r[{r}] < STEP", f"who = {r}; what = RETIRE"),
            (
                f"said_e[{r}] || said_c[{r}] || said_f[{r}] || said_r[{r}]",
                f"who = {r}; what = ACKNOWLEDGE",
            ),
            (f"!WORD(lost, {r}) && MAY_CRASH", f"who = {r}; what = LOSE"),
        ]
    for i in range(len(projection.requests)):
        moves += [
            (f"q[{i}] == Request_DECODE", f"who = {i}; what = FINISH"),
            (f"q[{i}] == Request_WAITING || LIVE(q[{i}])", f"who = {i}; what = ABORT"),
            (f"LIVE(q[{i}])", f"who = {i}; what = PREEMPT"),
        ]
    options = [f"      :: {guard} -> {action}" for guard, action in moves]
    lines = ["active proctype world() {", "end: do", "  :: atomic {", "      if", *options]
    return "\n".join([*lines, "      fi;", "      d_step { perform() }", "    }", "  od", "}", ""])
