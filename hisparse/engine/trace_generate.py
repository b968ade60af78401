"""Generate a request trace with the properties of the published one (Mooncake's).

Contract: a pure function of its arguments, no I/O. An id stands for one content: whatever precedes
it in one request precedes it in every request that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hisparse.config import ceil_div
from hisparse.engine.trace import HASH_BLOCK, TraceRequest
from hisparse.errors import ConfigError

OPEN_LIMIT = 512  # conversations that may go on; older ones are abandoned

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda n: n >= 0, "at least 0"),
    "seed": (lambda seed: 0 <= seed < 1 << 32, "0 to 2**32-1"),
    "requests_per_s": (lambda rate: rate > 0, "more than 0"),
    "median_input": (lambda median: median >= 1, "at least 1"),
    "median_output": (lambda median: median >= 1, "at least 1"),
    "sigma_input": (lambda sigma: sigma >= 0, "at least 0"),
    "sigma_output": (lambda sigma: sigma >= 0, "at least 0"),
    "followups": (lambda share: 0 <= share <= 1, "0 to 1"),
    "think_ms": (lambda ms: ms >= 0, "at least 0"),
    "system_prompts": (lambda lengths: all(n >= 0 for n in lengths), "lengths of at least 0"),
}


@dataclass
class _Conversation:
    length: int  # tokens so far: prompts and answers
    ids: list[int] = field(default_factory=list)  # of the full blocks of the last prompt
    ready_ms: float = 0.0  # when its user may ask again


def _check_arguments(given: Mapping[str, Any]) -> None:
    """Arguments of `generate_trace`, by name. Raises ConfigError for all that are out of range."""
    bad = {name: use for name, (good, use) in _RANGES.items() if not good(given[name])}
    longest = max(given["system_prompts"], default=0)
    if given["max_input"] <= longest:
        bad["max_input"] = f"more than the longest of system_prompts, {longest}"
    if bad:
        raise ConfigError("; ".join(f"{n}={given[n]}: use {use}" for n, use in bad.items()))


def _system_prompts(lengths: Sequence[int]) -> list[_Conversation]:
    """Conversations that have not begun, one a system prompt. Their blocks take the first ids."""
    systems: list[_Conversation] = []
    fresh = 0
    for length in lengths:
        blocks = length // HASH_BLOCK
        systems.append(_Conversation(length, list(range(fresh, fresh + blocks))))
        fresh += blocks
    return systems


def generate_trace(
    n: int,
    seed: int,
    *,
    requests_per_s: float = 3.4,
    median_input: int = 4500,
    sigma_input: float = 1.2,
    median_output: int = 230,
    sigma_output: float = 0.9,
    max_input: int = 128_000,
    followups: float = 0.35,
    think_ms: float = 20_000.0,
    system_prompts: Sequence[int] = (512, 1024),
) -> list[TraceRequest]:
    """`n` requests of a chat service, in time order, with the properties of the real trace.

    Arrivals are a Poisson process of `requests_per_s`. With probability `followups` an arrival is
    the next turn of a conversation that has had `think_ms` to read its answer: its prompt is the
    last prompt, the answer and a new message, up to `max_input` tokens. Otherwise it opens a
    conversation, with one of `system_prompts` (lengths in tokens) in front. Opening messages and
    answers are log-normal (`median_*` tokens, `sigma_*` of the logarithm), later messages too, at
    a quarter of the median. Only full blocks are shared: a block with new tokens gets a new id.
    Deterministic by `seed`, 0..2**32-1. Raises ConfigError for arguments out of range.
    """
    _check_arguments(locals())
    random = np.random.RandomState(seed)  # numpy promises its stream for ever

    def lognormal(median: float, sigma: float) -> int:
        return max(1, round(median * math.exp(sigma * random.standard_normal())))

    systems = _system_prompts(system_prompts)
    fresh = sum(len(system.ids) for system in systems)  # next unused id
    open_: list[_Conversation] = []
    now, out = 0.0, []
    for _ in range(n):
        now += 1000 * random.exponential(1 / requests_per_s)
        ready = (
            [c for c in open_ if c.ready_ms <= now] if random.random_sample() < followups else []
        )
        if ready:
            talk = ready[random.randint(len(ready))]
            talk.length += lognormal(median_input / 4, sigma_input)
            open_.remove(talk)
        else:
            start = systems[random.randint(len(systems))] if systems else _Conversation(0)
            message = lognormal(median_input, sigma_input)
            talk = _Conversation(start.length + message, list(start.ids))
        length = min(talk.length, max_input)
        new = ceil_div(length, HASH_BLOCK) - len(talk.ids)
        ids = (*talk.ids, *range(fresh, fresh + new))
        fresh += new
        answer = lognormal(median_output, sigma_output)
        out.append(TraceRequest(int(now), length, answer, ids))
        talk.ids = list(ids[: length // HASH_BLOCK])
        talk.length = length + answer
        talk.ready_ms = now + think_ms
        if talk.length < max_input:
            open_ = [*open_[1 - OPEN_LIMIT :], talk]
    return out
