"""What `import hisparse` gives: few names, all there, and nothing loaded before it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hisparse

NAMES_MAX = 25
ROOT = Path(hisparse.__file__).parents[1]
NAMES = [
    "Admitted", "CapacityError", "Changes", "ConfigError", "DeviceError", "HiSparseBackend",
    "HiSparseConfig", "HiSparseConnector", "HiSparseError", "InvariantViolation", "LogError",
    "ProtocolError", "Refused", "Rewound", "SchedulerConnector", "StaleEpoch", "StepPlan",
    "UsageError", "Waiting", "WorkerConnector", "__version__", "checked_config", "open_device",
]  # fmt: skip


def test_the_names_are_these_and_not_many():
    assert hisparse.__all__ == NAMES == sorted(NAMES) and dir(hisparse) == NAMES
    assert len(NAMES) <= NAMES_MAX
    for name in NAMES:
        assert getattr(hisparse, name) is not None, name


def test_a_type_checker_sees_the_same_names():
    tree = ast.parse(Path(hisparse.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name for node in block.body for alias in node.names}
    assert typed | {"__version__"} == set(NAMES)
    homes = {alias.name: node.module for node in block.body for alias in node.names}
    assert homes == {name: f"hisparse.{home}" for name, home in hisparse._HOMES.items()}


LOADED = """
import sys
import hisparse
assert not [m for m in sys.modules if m.startswith(("hisparse.", "numpy", "pydantic"))]
for name in hisparse.__all__:
    getattr(hisparse, name)
backend = hisparse.HiSparseBackend(
    {"layout": {"row_bytes": 8, "index_row_bytes": 4, "index_groups": [[0]]},
     "pools": {"gpu_blocks": 70, "host_pool_gib": 0.001}, "schedule": {"max_model_len": 64}}
)
backend.admit("a", [1, 2, 3], 4)
backend.shutdown()
assert "torch" not in sys.modules and "cupy" not in sys.modules
"""


def test_importing_it_loads_nothing_and_using_it_no_torch():
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'HiSparseBackends'"):
        hisparse.HiSparseBackends  # noqa: B018
