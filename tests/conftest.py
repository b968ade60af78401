"""Set-up of every test: fixed property-test profiles, one torch thread, and `tests/` on the path.

Profiles of Hypothesis: `ci`, the default, draws the same examples on every run and on any machine;
`dev` (``pytest --hypothesis-profile dev``) explores anew each time. A test's own `max_examples`
wins over both.

Helper modules are imported by name: pytest puts the folder of a test file on the path, and, since
this file is here, `tests/` itself, for the rigs that several folders share. So every file name
below `tests/` has to be unique.
"""

from __future__ import annotations

import os

# Before anything imports torch: its threads spin while they wait, and starve a shared machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import backends
import pytest
from hypothesis import HealthCheck, settings

from hisparse.device.cuda import kernels

pytest.register_assert_rewrite("cuda_world")  # it compares, and says by its asserts what differs

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", deadline=None, max_examples=200)
settings.load_profile("ci")


def pytest_addoption(parser):
    parser.addoption(
        "--racecheck",
        action="store_true",
        help="compile the resolve of one row in the form under which compute-sanitizer's racecheck "
        "comes to an end",
    )


def pytest_configure(config):
    if config.getoption("--racecheck"):
        kernels.OPTIONS += backends.RACECHECK


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request, monkeypatch):
    """Every rig of the test has a device of this kind."""
    monkeypatch.setattr(backends, "BACKEND", request.param)
    yield request.param
    backends.close_all()


@pytest.fixture
def cuda(monkeypatch):
    """For tests marked `gpu`: every rig has a GPU."""
    monkeypatch.setattr(backends, "BACKEND", "cuda")
    yield
    backends.close_all()
