"""What a simulation leaves on disk: its log, as `hisparse run --log` would have left it, for the
verbs that read logs; and beside it its program, for `hisparse fuzz --program`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

from hisparse.config import HiSparseConfig, LogConfig
from hisparse.errors import ConfigError
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.log import EventLog
from hisparse.fsm.log_history import STREAM
from hisparse.fsm.log_open import open_log
from hisparse.testing.program import to_json
from hisparse.testing.simulator import SimulationResult

PROGRAM = "program.json"


def keep(result: SimulationResult, directory: Path) -> None:
    """Write both below `directory`. Raises ConfigError where a log lies there already."""
    assert result.program is not None
    write_log(result, directory)
    (directory / PROGRAM).write_text(to_json(result.program), encoding="utf-8")


def keep_again(result: SimulationResult, directory: Path) -> None:
    """The same, in place of what `keep` left there before, and of nothing else."""
    if (directory / PROGRAM).exists():
        shutil.rmtree(directory / STREAM)
        (directory / PROGRAM).unlink()
    keep(result, directory)


class Logged(Protocol):
    """A run that is over, with the log of its scheduler."""

    @property
    def config(self) -> HiSparseConfig | None: ...

    @property
    def log(self) -> EventLog | None: ...


def write_log(result: Logged, directory: Path) -> None:
    """Write it below `directory`. Raises ConfigError where a log lies there already."""
    assert result.config is not None and result.log is not None
    if any(directory.glob("*/*.seg")):
        raise ConfigError(f"{str(directory)!r} already holds a log: give an empty directory")
    log = open_log(
        LogConfig(mode="disk", dir=directory),
        Codec(EVENT_TYPES),
        stream=STREAM,
        config_json=result.config.model_dump_json(),
        clock=lambda: 0.0,
        salt=b"",  # the same run gives the same bytes
    )
    for _, event in result.log.read(1):
        log.append(event)
    log.close()
