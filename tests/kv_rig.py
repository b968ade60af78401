"""A scheduler with a hand-held worker: tests say when copies are enqueued, complete or fail."""

from __future__ import annotations

import msgspec

from hisparse.config import (
    GIB,
    HiSparseConfig,
    ModelLayout,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
    SuffixConfig,
)
from hisparse.connector.base import KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.fsm.fold import fold
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.machines import BlockState, PageState
from hisparse.fsm.state import digest
from hisparse.fsm.wire import (
    Ack,
    AckKind,
    Acknowledgements,
    SparseKVOffloadCommand,
    Table,
    TransferKind,
)
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.kv.prefix import PageHasher

PAGE = 4


def make_config(
    *, blocks=64, host_pages=64, longest=64, ranks=1, suffix_pages=0, **changes
) -> HiSparseConfig:
    """Pages of 4 rows, 3 layers, index blocks of 6 pages, hot regions of 2 blocks."""
    suffix = SuffixConfig()
    if suffix_pages:
        suffix = SuffixConfig(name="cpu", gib=(suffix_pages + 1) * 64 / GIB)
    schedule = {"max_requests": 8, "prefill_chunk": 64, "step_rows": 64} | changes.pop(
        "schedule", {}
    )
    return HiSparseConfig(
        layout=ModelLayout(row_bytes=32, index_row_bytes=8, index_groups=((0, 1), (2,))),
        pools=PoolConfig(
            page_size=PAGE, gpu_blocks=blocks + 1, host_pool_gib=(host_pages + 1) * 512 / GIB
        ),
        policy=PolicyConfig(top_k=4, hot_rows=8, **changes),
        schedule=ScheduleConfig(max_model_len=longest, **schedule),
        suffix=suffix,
        ranks=ranks,
        checks="on",
    )


class SchedulerRig:
    """Drives a coordinator step by step; every check runs after every step."""

    def __init__(self, config: HiSparseConfig | None = None, log=None) -> None:
        self.config = config or make_config()
        self.log = log or MemoryLog(None)
        self.coordinator = HiSparseCoordinator(self.config, self.log)
        self.connector = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=self.coordinator)
        self.hasher = PageHasher(self.config.pools.page_size)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.commands: list[SparseKVOffloadCommand] = []
        self.sent: dict[int, int] = {}  # transfer -> epoch
        self._ack_seq = [0] * self.config.ranks

    @property
    def state(self):
        return self.coordinator.state

    # -- requests ---------------------------------------------------------------------------------
    def arrive(self, name: str, tokens: list[int], new: int = 4) -> tuple[str, int]:
        hashes = self.hasher.extend(b"", tokens)
        epoch = self.coordinator.arrive(name, len(tokens), len(tokens) + new, hashes)
        self.tokens[(name, epoch)] = list(tokens)
        return (name, epoch)

    def row(self, key: tuple[str, int]) -> int:
        return self.state.requests[key].row

    def step(self, *, rows: int = 64, only=None, ack: bool = True) -> SparseKVOffloadCommand:
        """Admit, compute up to `rows` rows of each live request, accept them.

        With `ack`, every copy of the command is enqueued and complete, and the step retired.
        """
        coordinator = self.coordinator
        coordinator.admit_waiting()
        live = [r for r in self.state.by_row if r is not None and r.live]
        live = [r for r in live if only is None or r.key in only]
        live = [r for r in live if self.state.rows.computed[r.row] < r.max_tokens]
        wanted = []
        for request in live:
            left = request.prompt_tokens - int(self.state.rows.computed[request.row])
            wanted.append(min(left, rows) if left > 0 else 1)
        granted = coordinator.grow([r.row for r in live], wanted)
        batch = [(r, n) for r, n in zip(live, granted, strict=True) if n]
        step = coordinator.plan_step([r.row for r, _ in batch], [n for _, n in batch])
        command = self.send()
        self._accept(step, batch)
        if ack:
            for rank in range(self.config.ranks):
                self.complete(*[t.transfer for t in command.transfers], rank=rank)
                self.complete(*[t.transfer for t in command.index_transfers], rank=rank)
            self.retire(step)
        self.check()
        return command

    def send(self) -> SparseKVOffloadCommand:
        meta = self.connector.build_connector_meta()
        command = msgspec.msgpack.decode(meta, type=SparseKVOffloadCommand)
        self.commands.append(command)
        self.sent |= {t.transfer: t.epoch for t in (*command.transfers, *command.index_transfers)}
        return command

    def _accept(self, step, batch) -> None:
        hashes = []
        for request, count in batch:
            tokens = self.tokens[request.key]
            end = int(self.state.rows.computed[request.row]) + count
            if end == len(tokens):
                tokens.append(1000 + len(tokens))
            size = self.hasher.page_size
            chain = self.hasher.extend(b"", tokens[: end // size * size])
            hashes += [(request.row, h) for h in chain[len(request.hashes) :]]
        rows, counts = [r.row for r, _ in batch], [n for _, n in batch]
        if batch:
            self.coordinator.rows_computed(step, rows, counts, hashes)

    def finish(self, key) -> None:
        self.coordinator.finish(*key)
        self.check()

    def abort(self, key) -> None:
        self.coordinator.abort(*key)
        self.check()

    def serve(self, name: str, tokens: list[int], steps: int) -> None:
        """A request comes, is finished after so many steps, and has drained a step later."""
        key = self.arrive(name, tokens)
        for _ in range(steps):
            self.step()
        self.finish(key)
        self.step()

    # -- the worker's answers ---------------------------------------------------------------------
    def acknowledge(self, *acks: Ack, rank: int = 0) -> bool:
        message = Acknowledgements(rank, 1, self._ack_seq[rank] + 1, acks)
        self._ack_seq[rank] += len(acks)
        taken = self.coordinator.update_acknowledgements(message)
        self.check()
        return taken

    def enqueue(self, *transfers: int, rank: int = 0) -> None:
        self.acknowledge(*[Ack(AckKind.ENQUEUED, t, self.sent[t]) for t in transfers], rank=rank)

    def complete(self, *transfers: int, rank: int = 0) -> None:
        self.acknowledge(*[Ack(AckKind.COMPLETED, t, self.sent[t]) for t in transfers], rank=rank)

    def fail(self, *transfers: int, rank: int = 0) -> None:
        self.acknowledge(*[Ack(AckKind.FAILED, t, self.sent[t]) for t in transfers], rank=rank)

    def retire(self, step: int | None = None) -> None:
        step = self.state.step if step is None else step
        for rank in range(self.config.ranks):
            self.acknowledge(Ack(AckKind.RETIRED, step), rank=rank)

    # -- looking ----------------------------------------------------------------------------------
    def blocks(self, key) -> list[int]:
        """Resident table of a request, trailing zeros cut."""
        table = self.state.table(Table.RESIDENT)[self.row(key)].tolist()
        return table[: int(self.state.rows.pages[self.row(key)])]

    def host(self, key) -> list[int]:
        return self.state.table(Table.HOST)[self.row(key)].tolist()

    def block_states(self, key) -> list[str]:
        return [BlockState(self.state.blocks.state[b]).name if b else "-" for b in self.blocks(key)]

    def page_state(self, page: int) -> str:
        return PageState(self.state.pages.state[page]).name

    def events(self, kind: type) -> list:
        return [e for _, e in self.log.read(1) if isinstance(e, kind)]

    def check(self) -> None:
        """Every invariant of the log and of the state, and the fold of the log."""
        self.coordinator.checker.state(self.state)
        self.coordinator.checker.raise_first()
        assert digest(fold(self.config, self.log.read(1))) == self.coordinator.digest()

    def drained(self) -> bool:
        """Nothing is leased in either pool."""
        state = self.state
        return (
            not state.requests
            and state.blocks.available == len(state.blocks.state) - 1
            and state.pages.available == len(state.pages.state) - 1
            and not state.suffix_copies
        )


def warm(prompt: list[int], **changes) -> SchedulerRig:
    """A rig whose caches hold the pages of a finished request."""
    rig = SchedulerRig(make_config(**changes))
    rig.serve("first", prompt, steps=4)
    assert rig.drained() and rig.state.prefix
    return rig


def restoring(prompt: list[int], **changes):
    """(rig, request, the copies that bring its hit on `prompt` back): rows were computed behind the
    hit; the copies are enqueued, none has completed."""
    rig = SchedulerRig(make_config(blocks=46, host_pages=100, longest=80, **changes))
    rig.serve("first", prompt, steps=3)
    for i in range(3):  # others take the cached GPU copies, the host pages stay
        rig.serve(f"other{i}", [5000 + 100 * i + t for t in range(60)], steps=3)
    key = rig.arrive("again", [*prompt, *range(600, 620)], new=20)
    copies = [t for t in rig.step(ack=False).transfers if t.kind is TransferKind.RESTORE]
    assert copies, "the hit was not restored"
    rig.enqueue(*[t.transfer for t in copies])
    return rig, key, copies
