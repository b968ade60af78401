"""Swarm: what one seed does, and does not do.

A world that does everything all the time hides faults behind each other. So each seed draws which
kinds of operation and of fault are on, and how often each strikes; what is off is off for the whole
run. Everything here is a function of the seed and of what the caller allows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hisparse.config import HiSparseConfig, PolicyConfig
from hisparse.testing.atlas import ATLAS
from hisparse.testing.worlds import random_config, with_suffix

STEPS = 200  # of the safety phase
RANKS_MAX = 3
OPERATIONS = ("abort", "preempt", "stop", "reset", "sleep")


@dataclass(frozen=True)
class Swarm:
    """One seed's world: `operations` and `faults` hold a chance by name, of those that are on."""

    seed: int
    config: HiSparseConfig
    lags: tuple[float, ...]
    operations: Mapping[str, float]
    faults: Mapping[str, float]
    arrivals: float  # chance of another request, each time one could come
    crowd: int  # requests that may be open at once
    tides: bool
    disk: Mapping[str, Any] | None  # options of a log on disk; None: it is in memory
    steps: int
    check_every: int

    @classmethod
    def of(
        cls,
        seed: int,
        *,
        ranks: int | None = None,
        steps: int = STEPS,
        kinds: Sequence[str] | None = None,
    ) -> Swarm:
        """The swarm of `seed`.

        Args:
            ranks: worker ranks; None: 1 to 3, drawn.
            steps: scheduler steps of the safety phase.
            kinds: kinds of fault that may be on (default: the whole atlas).
        """
        rng = random.Random(f"hisparse swarm {seed}")
        tides = rng.random() < 0.3
        config = random_config(rng, tides, rng.choice([0, 0, 1, 3]))
        config = with_suffix(config, rng)
        answer = rng.choice(["rewind", "rewind", "fail"])
        drawn = rng.choice([1, 1, 2, 2, 3])
        config = config.model_copy(
            update={
                "policy": config.policy.model_copy(update={"on_copy_failure": answer}),
                "ranks": ranks if ranks is not None else drawn,
            }
        )
        config = _at_the_edge(config, seed)
        # Each extreme of lag hides waits that the other shows, so the whole range is drawn.
        lags = tuple(rng.choice([0.0, 0.3, 0.6, 0.9, 0.97]) for _ in range(RANKS_MAX))
        operations = {
            name: rng.choice([0.003, 0.01, 0.05]) for name in OPERATIONS if rng.random() < 0.6
        }
        kinds = tuple(ATLAS) if kinds is None else tuple(kinds)
        return cls(
            seed,
            config,
            lags,
            operations,
            _drawn(seed, kinds),
            arrivals=rng.choice([0.1, 0.3, 0.8]),
            crowd=rng.choice([3, 6, 12]),
            tides=tides,
            disk=_disk(seed, kinds),
            steps=steps,
            check_every=rng.choice([1, 4, 16]),
        )


def _at_the_edge(config: HiSparseConfig, seed: int) -> HiSparseConfig:
    """The same world with fewer hot rows than a selection has, if that is not refused: what is
    accepted has to work."""
    rng = random.Random(f"hisparse edge {seed}")
    if rng.random() > 0.2:
        return config
    policy = config.policy.model_dump() | {"hot_rows": rng.randrange(1, config.policy.top_k)}
    try:
        return config.model_copy(update={"policy": PolicyConfig(**policy)})
    except ValidationError:
        return config


def _disk(seed: int, kinds: Sequence[str]) -> dict[str, Any] | None:
    """A log on disk, in one world of four, or wherever nothing but its faults is asked for."""
    needing = [kind for kind in kinds if ATLAS[kind].needs_disk]
    rng = random.Random(f"hisparse disk {seed}")
    if not needing or (rng.random() > 0.25 and len(needing) < len(kinds)):
        return None
    return {
        "fsync": rng.choice(["never", "interval", "commit", "commit"]),
        "segment_bytes": rng.choice([3000, 20_000, 1 << 20]),
        "on_error": rng.choice(["stop", "continue"]),
        "snapshot_events": rng.choice([0, 100, 1000]),
        "takes_snapshots": rng.random() < 0.4,
    }


def _drawn(seed: int, kinds: tuple[str, ...]) -> dict[str, float]:
    """Of the atlas, what is on and how often: each kind from its own chance, so that leaving
    another out changes nothing for it."""
    quiet = random.Random(f"hisparse faults {seed}").random() < 0.1  # no fault at all
    found = {}
    for kind in kinds:
        rng = random.Random(f"hisparse fault {kind} {seed}")
        share = 0.9 if len(kinds) < 4 else ATLAS[kind].share
        if rng.random() < share and not quiet:
            found[kind] = rng.choice(ATLAS[kind].rates)
    return found
