"""A configuration is the same, and refused the same, from a file, the environment or arguments."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hisparse.config import HiSparseConfig
from hisparse.config_check import checked_config
from hisparse.config_sources import OTHERS, given, load
from hisparse.errors import ConfigError

SECTIONS = {
    "layout": {"row_bytes": 656, "index_row_bytes": 132, "index_groups": [[0, 1], [2]]},
    "pools": {"page_size": 64, "gpu_blocks": 300, "host_pool_gib": 0.01},
    "policy": {"top_k": 16, "hot_rows": 64},
    "schedule": {"max_model_len": 257},
}
TOML = """
[layout]
row_bytes = 656
index_row_bytes = 132
index_groups = [[0, 1], [2]]
[pools]
page_size = 64
gpu_blocks = 300
host_pool_gib = 0.01
[policy]
top_k = 16
hot_rows = 64
[schedule]
max_model_len = 257
"""


def in_file(path, sections):
    path.write_text(json.dumps(sections))
    return path


def in_environment(monkeypatch, sections):
    for section, fields in sections.items():
        for name, value in fields.items() if isinstance(fields, dict) else [("", fields)]:
            text = json.dumps(value) if isinstance(value, list) else str(value)
            variable = f"HISPARSE_{section}__{name}" if name else f"HISPARSE_{section}"
            monkeypatch.setenv(variable.upper(), text)


def said(source, sections, tmp_path, monkeypatch):
    """`HiSparseConfig.load` where `sections` come from one of the sources."""
    if source == "file":
        return HiSparseConfig.load(in_file(tmp_path / "hisparse.json", sections))
    if source == "environment":
        in_environment(monkeypatch, sections)
        return HiSparseConfig.load()
    return HiSparseConfig.load(**sections)


@pytest.mark.parametrize("source", ["file", "environment", "arguments"])
def test_each_source_alone_makes_the_same_configuration(source, tmp_path, monkeypatch):
    assert said(source, SECTIONS, tmp_path, monkeypatch) == checked_config(SECTIONS)


def test_toml_makes_the_same_configuration(tmp_path):
    (tmp_path / "hisparse.toml").write_text(TOML)
    assert HiSparseConfig.load(tmp_path / "hisparse.toml") == checked_config(SECTIONS)


@pytest.mark.parametrize("source", ["file", "environment", "arguments"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pools": {"gpu_block": 300}}, "did you mean pools.gpu_blocks?"),
        ({"pool": {"gpu_blocks": 300}}, "no such key: did you mean pools?"),
        ({"rank": 2}, "no such key: did you mean ranks?"),
        ({"schedule": {"gpu_blocks": 300}}, "did you mean pools.gpu_blocks?"),
        ({"pools": {"gpu_blocks": -3}}, "Input should be greater than 1"),
        ({"policy": {"hot_rows": 8}}, "hot_rows=8 must be at least top_k=16"),
        ({"checks": "maybe"}, "Input should be 'on' or 'off'"),
    ],
)
def test_a_fault_is_told_in_the_same_words_with_its_source(
    source, change, says, tmp_path, monkeypatch
):
    sections = dict(SECTIONS)
    for section, part in change.items():
        over = isinstance(part, dict)
        sections[section] = {**sections.get(section, {}), **part} if over else part
    with pytest.raises(ConfigError) as refused:
        said(source, sections, tmp_path, monkeypatch)
    origin = {"file": "hisparse.json", "environment": "HISPARSE_", "arguments": "argument"}[source]
    assert says in str(refused.value)
    assert origin in str(refused.value)


def test_a_later_source_stands_above_an_earlier_one_and_says_so(tmp_path, monkeypatch):
    file = in_file(tmp_path / "hisparse.json", SECTIONS)
    monkeypatch.setenv("HISPARSE_POOLS__GPU_BLOCKS", "400")
    monkeypatch.setenv("hisparse_policy__top_k", "8")
    config, origins = load(file, pools={"gpu_blocks": 500})
    assert config.pools.gpu_blocks == 500 and config.policy.top_k == 8
    assert config.pools.page_size == 64, "sections are joined, not replaced"
    assert origins["pools.gpu_blocks"] == "argument"
    assert origins["policy.top_k"] == "hisparse_policy__top_k"
    assert origins["pools.page_size"] == str(file)
    assert "checks" not in origins


def test_a_section_in_one_variable_is_json():
    environ = {"HISPARSE_POOLS": '{"gpu_blocks": 7}', "HISPARSE_POOLS__PAGE_SIZE": "32"}
    data, origins = given(environ=environ)
    assert data == {"pools": {"gpu_blocks": 7, "page_size": "32"}}
    assert origins["pools.gpu_blocks"] == "HISPARSE_POOLS"


def test_what_runs_alone_ask_for_is_passed_over(tmp_path):
    file = in_file(tmp_path / "hisparse.json", SECTIONS | {"run": {"requests": 3}})
    assert HiSparseConfig.load(file) == checked_config(SECTIONS)


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        HiSparseConfig.load(tmp_path / "none.toml")
    for name, text, says in [
        ("a.toml", "[pools", "give JSON, or TOML"),
        ("a.json", "[pools]", "give JSON, or TOML"),
        ("b.json", "[1]", "holds list"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=says):
            HiSparseConfig.load(tmp_path / name)
    with pytest.raises(ConfigError, match="HISPARSE_LAYOUT__INDEX_GROUPS="):
        given(environ={"HISPARSE_LAYOUT__INDEX_GROUPS": "[[0"})


def test_variables_of_the_projects_own_tests_configure_nothing():
    """A run in CI would refuse them as keys that nobody knows."""
    root = Path(__file__).resolve().parents[1]
    made = [root / "Makefile", root / ".ci" / "run"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in made)
    set_there = set(re.findall(r"\b(HISPARSE_[A-Z_]+)=", text))
    assert len(set_there) >= 3 and set_there <= OTHERS
    assert given(environ=dict.fromkeys(OTHERS, "1")).data == {}


def test_torch_is_not_loaded_for_it():
    code = "import sys; from hisparse.config_sources import given; given()"
    check = "assert not {'torch', 'pydantic_settings'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True)
