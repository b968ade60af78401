"""Golden logs: one a format version, checked in and never written again, still read to the digest.

``python tests/fsm/test_log_golden.py`` makes that of the current format, where there is none yet.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from hisparse.fsm.codec import FORMAT_VERSION, Codec
from hisparse.fsm.log_history import LogHistory
from hisparse.fsm.log_reader import DiskReader
from hisparse.fsm.state import digest

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LOGS = sorted(GOLDEN.glob("format-*"))


def events_digest(history):
    """Of every frame, whatever this version makes of it."""
    total = hashlib.sha256()
    for seq, kind, body in history.frames(1):
        total.update(f"{seq} {kind} {len(body)} ".encode() + body)
    return total.hexdigest()


def recorded(directory):
    return json.loads((directory / "recorded.json").read_text(encoding="utf-8"))


def test_the_current_format_has_a_golden_log():
    assert GOLDEN / f"format-{FORMAT_VERSION}" in LOGS


@pytest.mark.parametrize("directory", LOGS, ids=lambda path: path.name)
def test_it_is_read_to_the_recorded_digest(directory):
    history, known = LogHistory.open(directory), recorded(directory)
    assert history.loss is None and history.gaps == []
    assert history.verify() == history.last_seq == known["events"]
    assert history.seq_of_step(known["step"]) == known["step_seq"]
    assert events_digest(history) == known["events_digest"]
    found = {seq: digest(history.state_at(int(seq))) for seq in known["digests"]}
    assert found == known["digests"]


@pytest.mark.parametrize("directory", LOGS, ids=lambda path: path.name)
def test_it_is_folded_to_that_digest_without_its_snapshots(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "log")
    shutil.rmtree(tmp_path / "log" / "scheduler" / "snapshots")
    history, known = LogHistory.open(tmp_path / "log"), recorded(directory)
    last = str(history.last_seq)
    assert digest(history.state_at(history.last_seq)) == known["digests"][last]


@pytest.mark.parametrize("directory", LOGS, ids=lambda path: path.name)
def test_its_snapshots_are_still_intact(directory):
    history = LogHistory.open(directory)
    seqs = history.snapshots.seqs()
    assert seqs and all(history.snapshots.read(seq) for seq in seqs)


@pytest.mark.parametrize("directory", LOGS, ids=lambda path: path.name)
def test_it_holds_plain_and_compressed_segments(directory):
    kinds = {info.compression for info in LogHistory.open(directory).segments}
    assert kinds == {"none", "zstd"}


@pytest.mark.parametrize("directory", LOGS, ids=lambda path: path.name)
def test_a_version_without_its_events_keeps_every_byte_of_them(directory):
    codec, stream = Codec(()), directory / "scheduler"
    frames = DiskReader(stream, codec).frames()
    for (seq, event), (at, kind, body) in zip(
        DiskReader(stream, codec).read(), frames, strict=True
    ):
        assert seq == at and codec.encode(event) == (kind, body)


def test_a_log_from_before_requests_were_rewound_says_that_they_failed():
    config = LogHistory.open(GOLDEN / "format-1").config
    assert config.policy.on_copy_failure == "fail"
    assert type(config.policy)().on_copy_failure == "rewind"


def make():
    """Write the golden log of the current format. Refuses to replace one."""
    from log_rig import write

    from hisparse.fsm.events import StepPlanned

    directory = GOLDEN / f"format-{FORMAT_VERSION}"
    if (directory / "scheduler").exists():
        raise SystemExit(f"{directory} is there: a golden log is never written again")
    write(directory, segment_bytes=6000, snapshot_events=150, compress=True)
    (directory / "scheduler" / "lock").unlink()
    history = LogHistory.open(directory)
    at, event = next((s, e) for s, e in history.read(200) if isinstance(e, StepPlanned))
    seqs = [0, 100, 149, 150, 151, 300, history.last_seq]
    known = {
        "events": history.last_seq,
        "step": event.step,
        "step_seq": at,
        "events_digest": events_digest(history),
        "digests": {str(seq): digest(history.state_at(seq)) for seq in seqs},
    }
    text = json.dumps(known, indent=1) + "\n"
    (directory / "recorded.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make()
