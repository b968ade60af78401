"""One run's log, whole and in each state of disrepair that a verb may meet."""

from __future__ import annotations

import shutil
from pathlib import Path

from cli_case import call

from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.log_files import OsDisk
from hisparse.fsm.log_history import LogHistory
from hisparse.fsm.snapshot import snapshot

TINY = ("--requests", 4, "--scale", 0.025, "--page-size", 8, "--top-k", 8, "--hot-rows", 16)
CODEC = Codec(EVENT_TYPES)
EARLY = 20  # a place before all damage
GAP_FROM, GAP_TO = 61, 80  # while these are told the disk is full: the commits up to 60 and 70 fail


class Refusing(OsDisk):
    """A full disk, while it is `full`."""

    full = False

    def write(self, fd, data, offset):
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(fd, data, offset)


def make_logs(folder: Path) -> dict[str, Path]:
    """Name -> path below `folder`, which need not hold a log."""
    logs = {name: folder / name for name in ("good", "torn", "damage", "early damage", "salvaged")}
    logs |= {name: folder / name for name in ("gap", "gap and snapshot", "empty", "gone")}
    good = logs["good"]
    assert call("run", *TINY, "--log", good).exit_code == 0
    shutil.copytree(good, logs["torn"])
    segment = logs["torn"] / "scheduler" / "00000001.seg"
    segment.write_bytes(segment.read_bytes()[:-3])
    shutil.copytree(good, logs["damage"])
    flip(logs["damage"] / "scheduler" / "00000001.seg")
    rewritten(good, logs["early damage"], segment_bytes=1500)
    flip(logs["early damage"] / "scheduler" / "00000004.seg")
    rewritten(good, logs["gap"], dropping=True)
    rewritten(good, logs["gap and snapshot"], dropping=True, snapshots=True)
    assert call("log", "recover", logs["damage"], "--salvage", logs["salvaged"]).exit_code == 3
    logs["empty"].mkdir()
    logs["a file"] = folder / "file"
    logs["a file"].write_text("x")
    logs["a stream"] = good / "scheduler"
    return logs


def flip(segment: Path) -> None:
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)


def rewritten(
    good: Path, out: Path, *, dropping: bool = False, snapshots: bool = False, **options: int
) -> None:
    """The same events in `out`, written again; `dropping`: on a disk that is full for a while."""
    source, disk = LogHistory.open(good), Refusing()
    log = DiskLog(
        out / "scheduler",
        CODEC,
        clock=lambda: 0.0,
        config_json=source.header.config,
        on_error="continue",
        disk=disk,
        **options,
    )
    for seq, event in source.read(1):
        log.append(event)
        disk.full = dropping and GAP_FROM <= seq + 1 <= GAP_TO
        if seq % 10 == 0:
            log.commit()
            if snapshots and seq == GAP_TO + 30:
                log.snapshot(seq, snapshot(source.state_at(seq)))
    log.close()
