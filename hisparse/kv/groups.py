"""Cache groups: what shares the packed GPU allocation, and the one that must never pose as such.

The source group (the host tier) has no device pool: its `block_pool_id` is None. Whoever wants a
device pool has to narrow it first, and the type checker sees to it: host ids are numbers of another
space, and would index a GPU pool without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hisparse.errors import UsageError
from hisparse.fsm.machines import BlockRole
from hisparse.fsm.state import BlockColumns, State


@dataclass(frozen=True)
class KVCacheGroup:
    """A group of caches that are placed together; `block_pool_id` None: not on the device."""

    name: str
    block_pool_id: int | None
    role: BlockRole | None = None


SOURCE_GROUP = KVCacheGroup("source", None)
RESIDENT_GROUP = KVCacheGroup("resident", 0, BlockRole.RESIDENT)
INDEX_GROUP = KVCacheGroup("index", 0, BlockRole.INDEX)
HOT_GROUP = KVCacheGroup("hot", 0, BlockRole.HOT)


def device_pool(state: State, group: KVCacheGroup) -> BlockColumns:
    """The GPU pool that `group` takes its blocks from. Raises UsageError for the source group."""
    if group.block_pool_id is None:
        raise UsageError(f"group {group.name!r} lives in the host pool: it has no device pool")
    return state.device_pools[group.block_pool_id]


if TYPE_CHECKING:

    def _host_ownership_cannot_pose_as_a_device_pool(state: State) -> BlockColumns:
        # mypy reports this ignore as unused on the day on which it would let the line pass.
        return state.device_pools[SOURCE_GROUP.block_pool_id]  # type: ignore[index]
