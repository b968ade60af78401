"""docs/transformers.md keeps its word: the example runs, and its log is checked and replayed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import transformers
from click.testing import CliRunner

from hisparse.cli import cli

TEXT = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_example_runs_and_so_do_its_commands(tmp_path, monkeypatch, capsys, name):
    (example,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    renamed = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    if name == "cache" and not renamed:
        pytest.skip(f"transformers {transformers.__version__} calls it past_key_values")
    assert "generate(**prompts, cache=cache" in TEXT and example.count("past_key_values=") == 1
    code = compile(example.replace("past_key_values", name), "docs/transformers.md", "exec")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", FutureWarning)
        exec(code, {})
    warned = any("`past_key_values` is deprecated" in str(one.message) for one in told)
    assert warned == (renamed and name == "past_key_values")
    pages = re.fullmatch(r"(\d+) pages left the GPU\n", capsys.readouterr().out)
    assert pages and int(pages[1]) > 5
    for command in re.findall(r"`hisparse ((?:check|replay) \S+)`", TEXT):
        ran = CliRunner().invoke(cli, command.split())
        assert ran.exit_code == 0, (command, ran.output)


def test_the_bench_measures_every_part():
    asked = "bench generate --context 96 --steps 2 --lines 2 --runs 1 --json"
    ran = CliRunner().invoke(cli, asked.split())
    assert ran.exit_code == 0, ran.output
    for name in ("decode step, stock eager", "decode step, small pool", "its resolve"):
        assert f'"name": "{name}"' in ran.output
