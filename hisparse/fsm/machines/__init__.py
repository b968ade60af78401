"""The seven machines of hisparse, one a file: states, triggers, arrows, and nothing else."""

from hisparse.fsm.machines.block_lease import BLOCK_LEASE, BlockRole, BlockState, BlockTrigger
from hisparse.fsm.machines.host_page import HOST_PAGE, PageState, PageTrigger
from hisparse.fsm.machines.hot_region import HOT_REGION, HotState, HotTrigger
from hisparse.fsm.machines.import_ import IMPORT, ImportState, ImportTrigger
from hisparse.fsm.machines.request import LIVE, REQUEST, RequestState, RequestTrigger
from hisparse.fsm.machines.staging_slot import STAGING_SLOT, SlotState, SlotTrigger
from hisparse.fsm.machines.transfer import TRANSFER, TransferState, TransferTrigger

MACHINES = (REQUEST, HOT_REGION, BLOCK_LEASE, HOST_PAGE, TRANSFER, IMPORT, STAGING_SLOT)

__all__ = [
    "BLOCK_LEASE",
    "HOST_PAGE",
    "HOT_REGION",
    "IMPORT",
    "LIVE",
    "MACHINES",
    "REQUEST",
    "STAGING_SLOT",
    "TRANSFER",
    "BlockRole",
    "BlockState",
    "BlockTrigger",
    "HotState",
    "HotTrigger",
    "ImportState",
    "ImportTrigger",
    "PageState",
    "PageTrigger",
    "RequestState",
    "RequestTrigger",
    "SlotState",
    "SlotTrigger",
    "TransferState",
    "TransferTrigger",
]
