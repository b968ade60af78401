"""hisparse: HiSparse local KV offload for sparse-MLA decode, as an event-sourced state machine.

A host tier under the GPU KV cache. Importing this package loads nothing else: take what you need
from `hisparse.config`, `hisparse.fsm`, `hisparse.kv`, `hisparse.connector` and `hisparse.device`.
"""

__version__ = "0.1.0.dev0"
