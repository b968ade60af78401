"""The floors of the house: who may import whom, who may do I/O, and what works without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from scheduler_rig import served, small_config

from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.log_disk import DiskLog

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "hisparse").rglob("*.py"))
TOP = 5
FLOORS = {
    "errors": 0,
    "config": 0,
    "config_check": 0,
    "config_packing": 0,
    "config_sections": 0,
    "config_sources": 0,
    "fsm": 1,
    "kv": 2,
    "device": 2,
    "connector": 3,
    "backend": 4,
    "backend_halves": 4,
    "engine": 4,
    "integrations": 4,
    "testing": TOP,
    "bench": TOP,
    "export": TOP,
    "cli": TOP,
}
SIDES = ({"kv", "device"}, {"engine", "integrations"})  # same floor, strangers to each other
ACCELERATOR = {"torch", "cupy", "cuda", "pynvml", "triton"}
OUTSIDE = {
    *("os", "io", "pathlib", "socket", "shutil", "tempfile", "subprocess", "fcntl", "mmap"),
    *("time", "datetime", "random", "secrets", "uuid", "threading", "asyncio", "urllib"),
}


def name_of(path):
    """``fsm.log_disk`` for hisparse/fsm/log_disk.py."""
    parts = path.relative_to(ROOT / "hisparse").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def floor_of(module):
    return module.partition(".")[0]


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree, *, typing=False, lazy=True):
    """Modules that `tree` imports; `typing`, `lazy`: also under TYPE_CHECKING, in functions."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield node.module or ""
            if node.module == "hisparse":
                yield from (f"hisparse.{alias.name}" for alias in node.names)
        if is_type_checking(node) and not typing:
            todo += node.orelse
        elif lazy or not isinstance(node, ast.FunctionDef):
            todo += ast.iter_child_nodes(node)


def inner(tree, **which):
    found = (name.partition(".") for name in imports(tree, **which))
    return sorted({rest for top, _, rest in found if top == "hisparse" and rest})


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def pure(module):
    return floor_of(module) in ("fsm", "kv") and not module.startswith("fsm.log")


def floors_broken(module, names):
    """Of the imported `names`, those that stand above `module` or beside it."""
    mine = floor_of(module)
    for name in names:
        theirs = floor_of(name)
        beside = any({mine, theirs} == side for side in SIDES)
        if beside or FLOORS.get(theirs, 0) > FLOORS[mine]:
            yield f"hisparse.{module} imports hisparse.{name}"


def test_every_module_stands_on_a_floor():
    entries = {"", "__main__"}
    assert {floor_of(module) for module in MODULES} - entries <= FLOORS.keys()


@pytest.mark.parametrize("module", [m for m in MODULES if floor_of(m) in FLOORS])
def test_a_module_imports_only_what_stands_below_it(module):
    assert list(floors_broken(module, inner(MODULES[module], typing=True))) == []


def test_the_connector_imports_the_device_side_only_in_its_worker_role():
    connector = {m: tree for m, tree in MODULES.items() if floor_of(m) == "connector"}
    assert any("device.worker" in inner(tree, typing=True) for tree in connector.values())
    for module, tree in connector.items():
        assert [n for n in inner(tree, lazy=False) if floor_of(n) == "device"] == [], module


def test_the_floors_are_felt():
    """Each rule, broken in a line, is found."""
    for module, line in (
        ("fsm.fold", "from hisparse.kv.budget import spare"),
        ("kv.budget", "from hisparse.device.layout import Geometry"),
        ("device.worker", "from hisparse import kv"),
        ("connector.base", "import hisparse.engine.loop"),
        ("errors", "def f():\n    from hisparse.fsm import events"),
    ):
        assert list(floors_broken(module, inner(ast.parse(line)))), line
    assert inner(ast.parse("if TYPE_CHECKING:\n    import hisparse.kv")) == []
    assert inner(ast.parse("if True:\n    import hisparse.kv"), lazy=False) == ["kv"]


@pytest.mark.parametrize("module", [m for m in MODULES if pure(m)])
def test_pure_code_touches_nothing_outside(module):
    tree = MODULES[module]
    tops = {name.partition(".")[0] for name in imports(tree, typing=True)}
    assert tops & (OUTSIDE | ACCELERATOR) == set()
    assert not {"numpy.random"} & set(imports(tree))
    assert set(calls(tree)) & {"open", "print", "input", "exec", "eval"} == set()
    assert "np.random" not in ast.unparse(tree)


@pytest.mark.parametrize("module", [m for m in MODULES if floor_of(m) in ("errors", "config")])
def test_the_ground_floor_takes_only_a_type_from_outside(module):
    tops = {name.partition(".")[0] for name in imports(MODULES[module])}
    assert tops & (OUTSIDE | ACCELERATOR) <= {"pathlib"}
    assert "open" not in set(calls(MODULES[module]))


@pytest.mark.parametrize("module", [m for m in MODULES if floor_of(m) != "device"])
def test_only_the_device_side_knows_an_accelerators_library(module):
    tops = {name.partition(".")[0] for name in imports(MODULES[module])}
    models = ("engine", "integrations", "bench", "cli")  # torch there runs the model
    assert tops & ACCELERATOR <= ({"torch"} if floor_of(module) in models else set())


BLOCKED = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "cupy", "cuda"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
for name in sys.argv[2].split(","):
    importlib.import_module(name)
from hisparse.config import HiSparseConfig
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.fold import fold
from hisparse.fsm.log_reader import DiskReader
from hisparse.fsm.state import digest
from pathlib import Path
reader = DiskReader(Path(sys.argv[1]), Codec(EVENT_TYPES))
print(digest(fold(HiSparseConfig.model_validate_json(sys.argv[3]), reader)))
"""


def test_a_log_is_replayed_to_the_same_digest_without_torch_and_cupy(tmp_path):
    config = small_config()
    log = DiskLog(tmp_path / "scheduler", Codec(EVENT_TYPES), clock=lambda: 0.0)
    coordinator = served(config, log=log)
    log.close()
    floors = ("fsm", "kv", "device", "connector")
    names = [f"hisparse.{m}" for m in MODULES if floor_of(m) in floors]
    arguments = [str(tmp_path / "scheduler"), ",".join(names), config.model_dump_json()]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == coordinator.digest()
