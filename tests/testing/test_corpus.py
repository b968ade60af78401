"""Programs that once failed, made smaller then: each holds now, and stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from hisparse.testing.program import from_json
from hisparse.testing.simulator import play

PROGRAMS = sorted((Path(__file__).resolve().parents[1] / "corpus" / "programs").glob("*.json"))


@pytest.mark.parametrize("path", PROGRAMS, ids=[path.stem for path in PROGRAMS])
def test_what_failed_once_holds(path):
    result = play(from_json(path.read_bytes(), path.name))
    assert result.violation is None, result.violation
    assert result.fired, "what it takes still strikes"
