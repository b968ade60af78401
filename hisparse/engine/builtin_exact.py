"""Integers carried in floats: the arithmetic in which any order of a sum gives the same bits.

Contract: everything here is exact or correctly rounded; see `engine.builtin` for why that matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparse.errors import ConfigError

QMAX = 127
RMS = 32.0  # of a quantised activation: clips at four sigma
EXACT_F32 = 1 << 24


@dataclass(frozen=True)
class Linear:
    """An integer matrix, [in, out], and the factor that brings its product to rms `RMS`."""

    weight: torch.Tensor
    scale: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@dataclass(frozen=True)
class Layer:
    """The weights of one layer."""

    query: Linear
    cached: Linear
    out: Linear
    up: Linear
    down: Linear


def coarse(layer: Layer, step: int) -> Layer:
    """The layer with its weights rounded to multiples of `step`."""
    made = {
        name: Linear(torch.round(part.weight / step) * step, part.scale)
        for name, part in vars(layer).items()
    }
    return Layer(**made)


def norm(h: torch.Tensor) -> torch.Tensor:
    """RMS-normalised int8 activations of the residual `h`. 128 squares below 2**40 sum exactly."""
    wide = h.double()
    mean = (wide * wide).sum(-1, keepdim=True) / h.shape[-1]
    return torch.round(wide / torch.sqrt(mean + 1.0) * RMS).clamp_(-QMAX, QMAX).float()


def require_exact(bound: int, what: str) -> None:
    """Raises ConfigError if a sum of magnitude `bound` could leave float32's exact range."""
    if bound >= EXACT_F32:
        raise ConfigError(f"{what} may reach {bound}, and float32 is exact only below {EXACT_F32}")


def quantise(x: torch.Tensor, scale: float) -> torch.Tensor:
    """`x * scale` as int8 activations, clipped to +-QMAX."""
    return torch.round(x * scale).clamp_(-QMAX, QMAX)


def to_bytes(x: torch.Tensor) -> torch.Tensor:
    """int8 activations as bytes to cache: uint8, contiguous."""
    return x.to(torch.int8).contiguous().view(torch.uint8)


def from_bytes(data: torch.Tensor) -> torch.Tensor:
    """Cached bytes as the integers they are: float32."""
    return data.view(torch.int8).float()
