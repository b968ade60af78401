"""The README keeps its word: its example runs, is as short as promised, and its links exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLE_LINES_MAX = 15


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_embedding_example_runs():
    set_up, example, ending = blocks("python")
    names: dict[str, object] = {}
    exec(compile(set_up, "README.md, set-up", "exec"), names)
    exec(compile(example, "README.md, example", "exec"), names)
    exec(compile(ending, "README.md, ending", "exec"), names)
    # It is about offload: pages left the GPU, and were read where they went.
    assert names["backend"].statistics()["events"]["spills"] > 0


def test_the_embedding_example_is_short():
    example = blocks("python")[1]
    assert len([line for line in example.splitlines() if line.strip()]) <= EXAMPLE_LINES_MAX


def test_the_commands_run_in_their_order_where_nothing_has_run_yet(tmp_path):
    (commands,) = blocks("sh")
    lines = [line.split("#")[0].strip() for line in commands.splitlines()]
    slow = ("make ", "export ", "hisparse bench ")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for line in (line for line in lines if not line.startswith(slow)):
        shell = line.replace("hisparse ", f"{sys.executable} -m hisparse ", 1)
        ended = subprocess.run(
            shell, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, (line, ended.stderr)


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_the_demo_on_the_first_screen_is_a_run_that_held():
    """Its output was pasted from a run: the two digests in it are equal, and all went well."""
    (demo,) = blocks("console")
    digests = set(re.findall(r"^  state_digest +([0-9a-f]{32})$", demo, re.MULTILINE))
    assert demo.startswith("$ make demo") and len(digests) == 1
    assert re.search(r"^  tokens_identical +yes$", demo, re.MULTILINE)
    assert re.search(r"^  violations +0$", demo, re.MULTILINE)
