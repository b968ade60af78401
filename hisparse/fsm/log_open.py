"""`open_log`: the event log that a `LogConfig` asks for, in memory or on disk.

The machine's clock and randomness are the defaults here, so that the logs themselves have theirs
injected.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable

from hisparse.config import LogConfig
from hisparse.errors import LogError, UsageError
from hisparse.fsm.codec import Codec
from hisparse.fsm.log import EventLog, MemoryLog
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.log_files import Disk

SALT_BYTES = 8
_STREAM = re.compile(r"[a-z0-9][a-z0-9._-]*")


def new_salt() -> bytes:
    """Of a log that begins: no frame of any other log, or stream, checks out in it."""
    return secrets.token_bytes(SALT_BYTES)


def open_log(
    config: LogConfig,
    codec: Codec,
    *,
    stream: str,
    config_json: bytes | str = "{}",
    salt: bytes | Callable[[], bytes] = new_salt,
    clock: Callable[[], float] = time.time,
    disk: Disk | None = None,
) -> EventLog:
    """The log that `config` asks for. `stream` names its directory: ``scheduler``, ``rank-0``.
    `salt` is that of all segments, or makes a new log's: one that is there then keeps its own.

    Raises UsageError for a stream name that is no plain file name, LogError as `DiskLog` does
    and for a directory that is a file.
    """
    if not _STREAM.fullmatch(stream):
        raise UsageError(f"stream={stream!r} must match {_STREAM.pattern}")
    if config.mode != "disk":
        return MemoryLog(0 if config.mode == "off" else config.ring_events)
    assert config.dir is not None  # LogConfig refuses disk mode without it
    try:
        is_file = config.dir.is_file()
    except OSError as error:
        raise LogError(
            f"log.dir={str(config.dir)!r} cannot be opened ({error.strerror}): give another name"
        ) from error
    if is_file:
        raise LogError(f"log.dir={str(config.dir)!r} is a file: give a directory, or another name")
    return DiskLog(
        config.dir / stream,
        codec,
        clock=clock,
        config_json=config_json,
        salt=salt,
        fsync=config.fsync,
        fsync_interval_s=config.fsync_interval_s,
        segment_bytes=config.segment_bytes,
        snapshot_events=config.snapshot_events,
        compress=config.compress,
        on_error=config.on_error,
        ring=config.ring_events,
        disk=disk,
    )
