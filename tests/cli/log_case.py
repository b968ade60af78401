"""Logs for the verbs that read them: written from events, whatever those say."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from scheduler_rig import events_of, served, small_config

from hisparse.config import HiSparseConfig
from hisparse.fsm.codec import Codec, LoggedEvent
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.log_disk import DiskLog


def write_log(
    directory: Path,
    config: HiSparseConfig,
    events: Iterable[LoggedEvent],
    stream: str = "scheduler",
) -> Path:
    log = DiskLog(
        directory / stream,
        Codec(EVENT_TYPES),
        clock=lambda: 0.0,
        config_json=config.model_dump_json(),
    )
    for event in events:
        log.append(event)
    log.close()
    return directory


def clean_events(seed: int = 1, **changes):
    """(config, events) of a whole small workload, without a device."""
    config = small_config(**changes)
    return config, [event for _, event in events_of(served(config, seed=seed))]
