"""What a backend cannot be made of is refused with the value and what to pass instead."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from embedding_rig import Engine, settings

from hisparse import HiSparseBackend, SchedulerConnector, WorkerConnector
from hisparse.errors import ConfigError, LogError, UsageError


@pytest.mark.parametrize("made", [HiSparseBackend, SchedulerConnector, WorkerConnector])
@pytest.mark.parametrize("config", ["hisparse.toml", Path("hisparse.toml"), None, []])
def test_a_configuration_is_no_path(made, config):
    with pytest.raises(ConfigError, match=r"config=.*HiSparseConfig\.load\(path\)"):
        made(config)


@pytest.mark.parametrize("made", [HiSparseBackend, WorkerConnector])
@pytest.mark.parametrize("device", [None, 0, Path("cpu")])
def test_a_device_is_a_name_or_a_backend(made, device):
    with pytest.raises(ConfigError, match=r"device=.* one of cpu, cuda"):
        made(settings(), device=device)


def test_a_log_is_a_directory_or_a_log(tmp_path):
    with pytest.raises(UsageError, match="log=5 must be a directory"):
        HiSparseBackend(settings(), log=5)
    with pytest.raises(UsageError, match=r"log='here' is no EventLog.*log\.dir"):
        SchedulerConnector(settings(), log="here")
    file = tmp_path / "file"
    file.write_bytes(b"kept")
    with pytest.raises(LogError, match=r"log\.dir='.*file' is a file: give a directory"):
        HiSparseBackend(settings(), log=file)
    assert file.read_bytes() == b"kept"


def test_a_log_that_holds_events_is_named_and_kept(tmp_path):
    used = tmp_path / "used"
    with HiSparseBackend(settings(), log=used) as backend:
        Engine(backend).admit("a", range(9), 3)
    before = {p: p.read_bytes() for p in used.rglob("*") if p.is_file()}
    for _ in range(2):  # who was refused holds no lock
        with pytest.raises(UsageError, match=r"used' already holds a log.*give an empty directory"):
            HiSparseBackend(settings(), log=used)
    assert {p: p.read_bytes() for p in used.rglob("*") if p.is_file()} == before


UNUSABLE = {
    "no such place": ("/proc/log", r"scheduler' in '/proc/log'.*give a directory"),
    "below a device": ("/dev/null/log", r"scheduler' in '/dev/null/log'.*give a directory"),
    "too long": ("n" * 300, r"log\.dir='nnn.*too long.*give another name"),
    "nul": ("a\0b", r"dir=.*'a\\x00b'.*give another name"),
    "no utf-8": ("a\udcff", r"dir=.*'a\\udcff'.*give another name"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_directory_that_cannot_be_written_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    directory, message = UNUSABLE[name]
    for how in ({"log": directory}, {}):
        made = settings() if how else settings(log={"mode": "disk", "dir": directory})
        with pytest.raises((ConfigError, LogError), match=message):
            HiSparseBackend(made, **how)
    assert not list(tmp_path.iterdir())


def test_the_events_of_a_rank_are_not_gone_on_with(tmp_path):
    with HiSparseBackend(settings(), log=tmp_path) as backend:
        Engine(backend).admit("a", range(9), 3)
    shutil.rmtree(tmp_path / "scheduler")
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*.seg")}
    with pytest.raises(UsageError, match=r"events of a rank.*give an empty directory"):
        HiSparseBackend(settings(), log=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*.seg")} == before
