"""A fold asserts the same under pytest, which rewrites the assertions of whoever has a plugin."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hisparse.fsm

FSM = Path(hisparse.fsm.__file__).parent
FOLDED = [*(FSM / "evolve").glob("*.py"), *(FSM / f"{m}.py" for m in ("fold", "state", "idqueue"))]


@pytest.mark.parametrize("path", sorted(FOLDED), ids=lambda path: path.stem)
def test_a_module_that_a_fold_asserts_in_is_not_rewritten(path):
    tree = ast.parse(path.read_text())
    asserts = any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    assert not asserts or "PYTEST_DONT_REWRITE" in (ast.get_docstring(tree) or "")
