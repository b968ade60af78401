"""docs/embedding.md keeps its word: its programs run as they stand, and print what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from embedding_rig import Engine, settings

from hisparse import HiSparseBackend, checked_config

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "embedding.md").read_text()
ENGINE_LINES_MAX = 80


def titled(language):
    """What each fenced block of `language` holds, by its title."""
    found = re.findall(rf'^```{language} title="(.*?)"\n(.*?)^```$', DOC, re.MULTILINE | re.DOTALL)
    return dict(found)


def run(folder, command):
    for name, text in titled("python").items():
        (folder / name).write_text(text)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *command.split()[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("command", ["python engine.py", "python two_processes.py"])
def test_a_program_prints_what_the_page_says(tmp_path, command):
    said = titled("text")[command]
    assert sorted(run(tmp_path, command).splitlines()) == sorted(said.splitlines())
    assert re.search(r"rows read from the host: [1-9]", said)


@pytest.mark.gpu
def test_the_engine_runs_on_a_gpu(tmp_path):
    printed = run(tmp_path, "python engine.py cuda")
    assert "same tokens in a pool where everything fits: True" in printed
    assert re.search(r"rows read from the host: [1-9]", printed)


def test_a_gpu_takes_the_shapes_of_the_example():
    from hisparse.device.cuda.kernels import ResolveSizes

    names: dict[str, object] = {}
    exec(titled("python")["model.py"], names)
    ResolveSizes.of(checked_config(names["CONFIG"]))


def test_the_engine_is_short():
    lines = [line for line in titled("python")["engine.py"].splitlines() if line.strip()]
    assert len(lines) <= ENGINE_LINES_MAX


def test_every_number_of_every_part_is_on_the_page(tmp_path):
    with HiSparseBackend(settings(suffix={"name": "cpu", "gib": 1e-5}), log=tmp_path) as backend:
        engine = Engine(backend)
        engine.admit("a", range(30), 9)
        engine.prefill("a")
        statistics = backend.statistics()
        rows = {part: row for row in table_rows() for part in re.findall(r"`(\w+)`", row[0])}
        assert statistics.keys() == rows.keys()
        for part, numbers in statistics.items():
            for counted in numbers if isinstance(numbers, list) else [numbers]:
                for name, value in counted.items():
                    assert isinstance(value, int) or (part, name) in NAMED, (part, name)
                    listed = part == "events" or f"`{name}`" in "".join(rows[part])
                    assert listed or (part == "worker" and f"`{name}`" in rows["groups"][2]), name
    closed = backend.statistics()
    assert closed.keys() == statistics.keys() and closed["worker"] == {} and not closed["layers"]


NAMED = {("log", "mode"), ("rank_log", "mode")}


def table_rows():
    section = DOC.partition("## Statistics")[2]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
