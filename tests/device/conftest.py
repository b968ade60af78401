"""The backends that a test runs on: `cpu`, and `cuda` where a GPU is asked for (`-m gpu`)."""

from __future__ import annotations

import device_rig
import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request, monkeypatch):
    """Every `Rig` of the test has a device of this kind."""
    monkeypatch.setattr(device_rig, "BACKEND", request.param)
    yield request.param
    while device_rig.OPEN:
        device_rig.OPEN.pop().close()
