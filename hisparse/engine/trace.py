"""Request traces: read Mooncake JSONL, scale it to a workload, write it.

A trace has one JSON object a line: `timestamp` (ms), `input_length` and `output_length` (tokens)
and `hash_ids`, one id per 512 prompt tokens, the last block possibly short. Equal leading ids are
a shared prefix, and that is all that a trace says about content; so prompts are made up, as a
function of the ids alone, with exactly the sharing that the ids claim:

    input_length 1200      |---- 512 ----|---- 512 ----|- 176 -|     rest = 1200 - 2 * 512
    hash_ids                      a             b          c
    scale 1/16             |----- 32 ----|----- 32 ----|- 11 --|     tokens of a, of b, of c

Contract: everything is a pure function of its arguments (randomness by seed), a bad line is
refused with file, line, field, value and fix, and only `read_trace` and `write_trace` do I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hisparse.config import ceil_div
from hisparse.errors import ConfigError

HASH_BLOCK = 512
"""Prompt tokens that one hash id stands for."""
ID_BITS = 63
TIMESTAMP_BITS = 48  # milliseconds: their microseconds stay exact in a float and fit an int64
MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15  # splitmix64's increment


class TraceRequest(msgspec.Struct, frozen=True, rename={"timestamp_ms": "timestamp"}):
    """One line of a trace."""

    timestamp_ms: int
    """Arrival, in ms from the start of the trace."""
    input_length: int
    """Prompt tokens, at least 1."""
    output_length: int
    """Generated tokens, 0 or more."""
    hash_ids: tuple[int, ...]
    """One id, 0..2**63-1, per 512 prompt tokens: ceil(input_length / 512) of them."""


@dataclass(frozen=True)
class WorkloadRequest:
    """A request to serve: a scaled `TraceRequest` with tokens in place of ids."""

    request: str
    arrival_ms: float
    prompt: np.ndarray
    """int64 [n], n >= 1, without the EOS id."""
    max_new: int


# -- reading and writing -------------------------------------------------------------------------
def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a JSONL file in file order, the first `limit` of them if given.

    Blank lines are skipped; fields beyond the four are ignored. Raises ConfigError, one line long,
    for a file that cannot be read or a line that is not a request.
    """
    path = Path(path)
    requests: list[TraceRequest] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip():
                    requests.append(_parse(line, f"{path}:{number}"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"trace {path}: {reason}; give the path of a readable JSONL trace"
        ) from None
    return requests


def _parse(line: bytes, where: str) -> TraceRequest:
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = _shown(line.strip().decode("utf-8", "backslashreplace"))
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{where}: line={shown} is not JSON ({reason}); write one JSON object a line"
        ) from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{where}: line={_shown(raw)} is not a request; write an object with timestamp, "
            "input_length, output_length and hash_ids"
        )
    length = _integer(raw, "input_length", 1, where)
    ids = _field(raw, "hash_ids", where)
    if not isinstance(ids, list):
        raise ConfigError(f"{where}: hash_ids={_shown(ids)} is not a list; write a list of ids")
    for at, ident in enumerate(ids):
        _check_integer(ident, f"hash_ids[{at}]", 0, where)
    if len(ids) != ceil_div(length, HASH_BLOCK):
        raise ConfigError(
            f"{where}: hash_ids has {len(ids)} ids and input_length={length} needs "
            f"{ceil_div(length, HASH_BLOCK)}; write one id per {HASH_BLOCK} prompt tokens"
        )
    return TraceRequest(
        timestamp_ms=_integer(raw, "timestamp", 0, where, TIMESTAMP_BITS),
        input_length=length,
        output_length=_integer(raw, "output_length", 0, where),
        hash_ids=tuple(ids),
    )


def _shown(value: object) -> str:
    """A value for a message: on one line, and not the whole of a long one."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _field(raw: dict[str, Any], name: str, where: str) -> Any:
    if name not in raw:
        raise ConfigError(f"{where}: {name} is missing from line={_shown(raw)}; add it")
    return raw[name]


def _integer(raw: dict[str, Any], name: str, least: int, where: str, bits: int = 63) -> int:
    return _check_integer(_field(raw, name, where), name, least, where, bits)


def _check_integer(value: object, name: str, least: int, where: str, bits: int = 63) -> int:
    if type(value) is not int or not least <= value < 1 << bits:  # bool is no integer here
        raise ConfigError(
            f"{where}: {name}={_shown(value)} cannot be used; "
            f"write an integer from {least} to 2**{bits}-1"
        )
    return value


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> None:
    """Write `requests` as JSONL, replacing the file. Raises ConfigError where it cannot."""
    encoder = msgspec.json.Encoder()
    try:
        with Path(path).open("wb") as out:
            for request in requests:
                out.write(encoder.encode(request) + b"\n")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"trace {path}: {reason}; give a path that can be written") from None


# -- scaling -------------------------------------------------------------------------------------
def _mix(x: int) -> int:
    """splitmix64's finisher: a fixed, well-mixed permutation of 64-bit integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def block_tokens(
    hash_id: int, count: int, *, seed: int = 0, vocab_size: int = 384, eos: int = 383
) -> np.ndarray:
    """The first `count` tokens of a hash block: int64 [count], without `eos`.

    A function of the id, the same for every `count`. The first tokens spell the id in base
    vocab_size - 1, each digit shifted by a hash of the digits before it: random to look at, and
    yet different ids below (vocab_size - 1) ** count give different blocks, without exception.
    """
    base = vocab_size - 1
    digits = math.ceil(ID_BITS / math.log2(base))  # that hold any id
    tokens: list[int] = []
    state = _mix((seed + STEP) & MASK)
    left = hash_id
    for _ in range(min(count, digits)):
        left, digit = divmod(left, base)
        tokens.append((digit + state) % base)
        state = _mix((state + (tokens[-1] + 1) * STEP) & MASK)
    if count > digits:
        # the same finisher over a counter, in uint64 arrays that wrap as the masks above do
        counter = np.arange(1, count - digits + 1, dtype=np.uint64)
        x = np.uint64(state) + counter * np.uint64(STEP)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        tokens += ((x ^ (x >> np.uint64(31))) % np.uint64(base)).tolist()
    out = np.array(tokens, dtype=np.int64)
    return out + (out >= eos)


def scale_request(
    r: TraceRequest,
    scale: float,
    max_new: int | None = None,
    *,
    request: str = "r0",
    seed: int = 0,
    vocab_size: int = 384,
    eos: int = 383,
) -> WorkloadRequest:
    """`r` with every length and time multiplied by `scale`, and tokens in place of hash ids.

    A hash block becomes max(1, round(512 * scale)) tokens and the last one, of `rest` tokens,
    max(1, round(rest * scale)): blocks stay whole, so that prefixes are shared at every scale.
    max_new: upper limit of the generated tokens. request: the id. Raises ConfigError for a scale
    that is not positive, max_new < 1, or a vocabulary without two ids besides `eos`.
    """
    if not (scale > 0 and math.isfinite(scale)):
        raise ConfigError(f"scale={scale}: use a positive number")
    if max_new is not None and max_new < 1:
        raise ConfigError(f"max_new={max_new}: use at least 1, or None for no limit")
    if vocab_size < 3 or not 0 <= eos < vocab_size:
        raise ConfigError(f"vocab_size={vocab_size}, eos={eos}: use eos < vocab_size >= 3")
    full = max(1, round(HASH_BLOCK * scale))
    rest = r.input_length - HASH_BLOCK * (len(r.hash_ids) - 1)
    counts = [full] * (len(r.hash_ids) - 1) + [max(1, round(rest * scale))]
    prompt = np.concatenate(
        [
            block_tokens(ident, count, seed=seed, vocab_size=vocab_size, eos=eos)
            for ident, count in zip(r.hash_ids, counts, strict=True)
        ]
    )
    new = max(1, round(r.output_length * scale))
    return WorkloadRequest(
        request=request,
        arrival_ms=r.timestamp_ms * scale,
        prompt=prompt,
        max_new=new if max_new is None else min(new, max_new),
    )


def scale_trace(
    requests: Sequence[TraceRequest],
    scale: float,
    max_new: int | None = None,
    *,
    seed: int = 0,
    vocab_size: int = 384,
    eos: int = 383,
) -> list[WorkloadRequest]:
    """`scale_request` of each, with ids r0, r1, ... in trace order."""
    return [
        scale_request(r, scale, max_new, request=f"r{i}", seed=seed, vocab_size=vocab_size, eos=eos)
        for i, r in enumerate(requests)
    ]
