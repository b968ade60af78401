"""The built-in model's sizes, weights and tables: a function of the seed, the same everywhere.

Contract: integers carried in float32, small enough that every sum over them is exact; see
`engine.builtin` for why that matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from hisparse.engine.builtin_exact import QMAX, RMS, Layer, Linear, coarse, require_exact
from hisparse.engine.builtin_indexer import INDEX_HEADS, INDEX_WIDTH, Indexer

VOCAB = 384
EOS = 383
WIDTH = 128
HEADS = 4
LATENT = 96
ROPE = 32
ROW = LATENT + ROPE
MLP = 256
GROUPS = ((0, 1, 2), (3, 4, 5))
DRAFT_LAYER = 6
DRAFT_FROM = 3  # the layer whose weights it has, coarser
DRAFT_STEP = 16  # to multiples of this

GRID = 256.0  # residual steps in 1.0
RESIDUAL_MAX = float((1 << 20) - 1)
MAX_TOP_K = 2048
PHASES = 1 << 16
SOFTMAX_PEAK = 64  # 2048 * 64 * 127 < 2**24: a weighted sum over the whole top-k is exact
SOFTMAX_STEP = 256.0
SOFTMAX_TABLE = 128
PLACES = 251  # period of the additive position table: keeps greedy decoding out of short loops
EOS_HANDICAP = 0.6  # sigmas off the EOS logit: rare, but not never


@dataclass(frozen=True)
class Tables:
    """What elementwise functions are looked up in."""

    cos: torch.Tensor
    sin: torch.Tensor
    steps: torch.Tensor
    """int64: phases a position turns each rotary pair by"""
    softmax: torch.Tensor
    place: torch.Tensor
    """[PLACES, WIDTH], added to a token's embedding by its position"""


@dataclass(frozen=True)
class Weights:
    """By layer and by index group; the draft head's come last."""

    embed: torch.Tensor
    layers: tuple[Layer, ...]
    indexers: tuple[Indexer, ...]
    unembed: Linear


def build(seed: int, device: torch.device, *, draft: bool) -> tuple[Weights, Tables]:
    """Weights and tables on `device`, with a draft head or without."""
    # RandomState, because numpy promises its stream for ever; a Generator's may change
    random = np.random.RandomState(seed)

    def tensor(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    def linear(inner: int, outer: int, gain: float = 1.0) -> Linear:
        require_exact(inner * QMAX**2, f"a sum of {inner} int8 products")
        weight = random.randint(-QMAX, QMAX + 1, size=(inner, outer))
        sigma = math.sqrt(QMAX * (QMAX + 1) / 3)
        return Linear(tensor(weight), gain / (sigma * math.sqrt(inner)))

    grid = GRID / RMS  # a unit-gain block adds 1.0 rms to the residual
    embed = tensor(random.randint(-256, 257, size=(VOCAB, WIDTH)))
    place = tensor(random.randint(-256, 257, size=(PLACES, WIDTH)))
    layers = [
        Layer(
            query=linear(WIDTH, HEADS * ROW),
            cached=linear(WIDTH, ROW),
            out=linear(HEADS * LATENT, WIDTH, grid),
            up=linear(WIDTH, MLP),
            down=linear(MLP, WIDTH, grid),
        )
        for _ in range(DRAFT_LAYER)
    ]
    indexers = [
        Indexer(
            query=linear(WIDTH, INDEX_HEADS * INDEX_WIDTH, 0.5),
            key=linear(WIDTH, INDEX_WIDTH),
            head_weight=linear(WIDTH, INDEX_HEADS, 2 / RMS),
            bias=tensor(random.randint(-40, 41, size=INDEX_HEADS * INDEX_WIDTH)),
        )
        for _ in GROUPS
    ]
    unembed = linear(WIDTH, VOCAB)
    if draft:
        layers.append(coarse(layers[DRAFT_FROM], DRAFT_STEP))
        indexers.append(indexers[1])
    return Weights(embed, tuple(layers), tuple(indexers), unembed), _tables(place)


def _tables(place: torch.Tensor) -> Tables:
    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=place.device)

    turn = [2 * math.pi * i / PHASES for i in range(PHASES)]
    # from 1/8 turn down to one phase, geometric
    top = PHASES // 8
    steps = [round(top ** (1 - i / (ROPE // 2 - 1))) for i in range(ROPE // 2)]
    decay = [round(SOFTMAX_PEAK * math.exp(-i / 24)) for i in range(SOFTMAX_TABLE - 1)]
    require_exact(MAX_TOP_K * SOFTMAX_PEAK * QMAX, "a weighted sum over the top-k")
    return Tables(
        cos=tensor([round(QMAX * math.cos(a)) for a in turn]),
        sin=tensor([round(QMAX * math.sin(a)) for a in turn]),
        steps=torch.tensor(steps, dtype=torch.int64, device=place.device),
        softmax=tensor([*decay, 0]),
        place=place,
    )
