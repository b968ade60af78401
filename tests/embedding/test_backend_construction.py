"""What a backend cannot be made of is refused with the value and what to pass instead."""

from __future__ import annotations

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
