"""BatchInvariant: a forward pass in which no token's bits depend on what it is batched with.

Contract: inside the mode, row i of every matrix product, and row i of every top-k, is a function of
row i of its operand alone, to the bit: not of how many rows there are, nor of how many columns lie
behind. Serving can then be compared with an oracle that batches otherwise, with no tolerance.

A BLAS picks its kernel, and with it the order of a sum, by the shape and the strides of a product.
So here each row is a product of its own, all of one shape, and columns whose count varies (the
positions of a context) come in tiles of `TILE`. Of equal values, a top-k takes the earlier.

Two things are the caller's: rows come in multiples of `ROWS`, so that no elementwise kernel has a
scalar tail (exp of a vector and exp of a scalar differ in the last bit), and torch has one thread,
as a second one would cut elsewhere. Sums over a last dimension are row by row in torch already. A
product that is not known here raises UsageError: it would be a hole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hisparse.errors import UsageError

ROWS = 32  # two AVX-512 vectors of float32: one turn of torch's elementwise loops
TILE = 64

aten = torch.ops.aten


class BatchInvariant(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``with BatchInvariant():`` around the forward pass, under ``torch.no_grad``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _REFUSED:
            raise UsageError(
                f"{func} is not batch-invariant, and has no replacement: give the model another "
                "attention or experts implementation, or add it to batch_invariant.py"
            )
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[m, k] x [k, n], each row a product of its own."""
    return torch.bmm(a[:, None], b.expand(len(a), *b.shape))[:, 0]


def addmm(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """beta * c + alpha * [m, k] x [k, n]."""
    return beta * c + alpha * mm(a, b)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[batch, m, k] x [batch, k, n]: m is the model's (heads of a token), and so is n below `TILE`;
    more columns come in tiles, each column's k values adjacent."""
    if b.shape[2] == 1 < a.shape[1]:  # a matrix and a vector: the vector is the row
        return bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2)
    batch, k, columns = b.shape
    if columns < TILE:
        return torch.bmm(a, b)
    beyond = -columns % TILE
    rows = torch.nn.functional.pad(b.transpose(1, 2), (0, 0, 0, beyond)).contiguous()
    tiles = rows.view(-1, TILE, k).transpose(1, 2)
    each = (columns + beyond) // TILE
    out = torch.bmm(a[:, None].expand(-1, each, -1, -1).flatten(0, 1), tiles)
    out = out.view(batch, each, -1, TILE).transpose(1, 2)
    return out.flatten(2)[..., :columns]


def topk(
    values: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of the last dimension of float32 `values`; of equal ones, the earlier."""
    if values.dtype is not torch.float32 or dim % values.ndim != values.ndim - 1 or not largest:
        raise UsageError(
            f"topk of {values.dtype} along dimension {dim}, largest={largest}: only the largest "
            "float32 along the last dimension are known here"
        )
    bits = (values + 0.0).view(torch.int32)  # + 0.0: there is one zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    later = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    at = (ordered * (1 << 32) + later).topk(k, sorted=True).indices
    return values.gather(-1, at), at


_INSTEAD: dict[Any, Callable[..., Any]] = {
    aten.mm.default: mm,
    aten.addmm.default: addmm,
    aten.bmm.default: bmm,
    aten.topk.default: topk,
}
_REFUSED = {
    aten.linear.default,  # what inference mode makes of a linear layer, which is not taken apart
    aten.matmul.default,
    aten.mv.default,
    aten.addmv.default,
    aten.dot.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._grouped_mm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
