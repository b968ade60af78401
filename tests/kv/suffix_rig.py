"""A scheduler whose suffix source is the real one, and says what it was asked for."""

from __future__ import annotations

import numpy as np
from kv_rig import SchedulerRig, make_config

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockRole
from hisparse.kv.suffix_cpu import CpuSuffix

STEM = list(range(52))  # 13 pages: two whole index blocks of six pages, and one page of a third

PAGES = 13


class Spy(CpuSuffix):
    """The real source, and what it was asked for."""

    def __init__(self, state, most=1 << 30):
        super().__init__(state)
        self.asked, self.most = [], most

    def lookup(self, hashes):
        self.asked.append(tuple(hashes))
        return min(super().lookup(hashes), self.most)


def rig_with(
    *, suffix_pages=64, blocks=64, host_pages=64, ranks=1, most=1 << 30, longest=64, **policy
):
    rig = SchedulerRig(
        make_config(
            blocks=blocks,
            host_pages=host_pages,
            ranks=ranks,
            suffix_pages=suffix_pages,
            longest=longest,
            **policy,
        )
    )
    if suffix_pages:
        rig.coordinator.suffix = Spy(rig.state, most)
    return rig


def serve(rig, name="first", tokens=STEM):
    key = rig.arrive(name, tokens)
    for _ in range(4):
        rig.step()
    rig.finish(key)
    for _ in range(2):
        rig.step()
    return key


def lose_index(rig, keep=0):
    """Cached index blocks go, but for those of the first `keep` pages of the stem."""
    kept = {rig.state.index_prefix[h][0] for h in rig.hasher.extend(b"", STEM)[:keep]}
    cached = rig.state.blocks.cached.ordered()
    gone = cached[rig.state.blocks.role[cached] == BlockRole.INDEX]
    gone = np.array([block for block in gone.tolist() if block not in kept], dtype=np.int64)
    epochs = tuple(rig.state.blocks.epoch[gone].tolist())
    rig.coordinator._record(ev.BlocksEvicted(0, tuple(gone.tolist()), epochs))


def again(rig, name="again", **kwargs):
    key = rig.arrive(name, [*STEM, 7], **kwargs)
    command = rig.step(ack=False)
    return key, command
