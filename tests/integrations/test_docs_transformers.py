"""docs/transformers.md keeps its word: the example runs, and its log is checked and replayed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from click.testing import CliRunner

from hisparse.cli import cli

TEXT = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")


def test_the_example_runs_and_so_do_its_commands(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/transformers.md", "exec"), {})
    pages = re.fullmatch(r"(\d+) pages left the GPU\n", capsys.readouterr().out)
    assert pages and int(pages[1]) > 5
    for command in re.findall(r"`hisparse ((?:check|replay) \S+)`", TEXT):
        ran = CliRunner().invoke(cli, command.split())
        assert ran.exit_code == 0, (command, ran.output)


def test_the_bench_measures_every_part():
    asked = "bench generate --context 64 --steps 2 --lines 2 --runs 1 --json"
    ran = CliRunner().invoke(cli, asked.split())
    assert ran.exit_code == 0, ran.output
    for name in ("decode step, stock eager", "decode step, small pool", "its resolve"):
        assert f'"name": "{name}"' in ran.output
