"""`hisparse run --model`: the main job with models of transformers, its log, and its refusals."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest
from cli_case import SMALL, call, error_of, report_of

from hisparse.engine.tiered import TieredCache
from hisparse.engine.trace import write_trace
from hisparse.engine.trace_generate import generate_trace

KINDS = ("deepseek_v32", "glm_moe_dsa")


@pytest.fixture
def crowd(tmp_path):
    """Options of five requests that want more than the pool holds; some go away, some come back."""
    trace = generate_trace(
        5,
        seed=3,
        requests_per_s=50,
        median_input=4000,
        sigma_input=0.3,
        median_output=800,
        sigma_output=0.3,
        followups=1,
    )
    write_trace(tmp_path / "crowd.jsonl", trace)
    sizes = "--seed 3 --scale 0.015 --page-size 8 --top-k 8 --hot-rows 16 --gpu-blocks 52"
    leaving = "--preempt-rate 0.5 --abort-rate 0.2"
    return ["--trace", tmp_path / "crowd.jsonl", *sizes.split(), *leaving.split(), "--json"]


@pytest.fixture
def installed():
    pytest.importorskip("transformers", reason="models of transformers: install it")


@pytest.mark.parametrize("kind", KINDS)
def test_a_crowd_is_served_bit_for_bit_and_its_log_replays(tmp_path, installed, crowd, kind):
    log = tmp_path / "log"
    report = report_of(call("run", "--model", kind, *crowd, "--log", log))
    assert report["tokens_identical"] is True and report["invariants"]["violations"] == []
    assert {"content", "table_truth", "replay_equal"} <= set(report["invariants"]["checked"])
    assert report["requests_finished"] == 4 and report["requests_aborted"] == 1
    for name in ("spills", "restores", "preemptions", "prefix_hit_tokens", "hot_misses"):
        assert report[name] > 0, name
    assert report["concurrent_requests_hisparse"] > 1
    assert report["gpu_blocks_leased_at_end"] == report["host_pages_leased_at_end"] == 0

    assert call("check", log).exit_code == 0
    replayed = report_of(call("replay", log, "--json"))
    assert replayed["state_digest"] == report["state_digest"]


def test_one_wrong_byte_in_one_row_is_found(monkeypatch, installed, crowd):
    gather, calls = TieredCache.gather, []

    def spoilt(self, layer, top_k):
        rows = gather(self, layer, top_k)
        calls.append(layer)
        if len(calls) == 40:
            rows[0, 0, 3] ^= 0x40  # an exponent
        return rows

    monkeypatch.setattr(TieredCache, "gather", spoilt)
    result = call("run", "--model", "deepseek_v32", *crowd)
    assert result.exit_code == 1
    assert "tokens differ from the oracle's" in result.stderr and "content" in result.stderr


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--spec", 2], ["spec=2", "no draft head", "--model builtin"]),
        (["--graph"], ["--graph: ", "no decode step of fixed shape", "--eager"]),
        (["--device", "cuda"], ["device='cuda'", "--device cpu"]),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_these_models_cannot_do_is_one_line(kind, option, says):
    line = error_of(call("run", "--model", kind, *option))
    for text in (f"model={kind!r}", *says):
        assert text in line


def test_without_transformers_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("hisparse.integrations")]:
        monkeypatch.delitem(sys.modules, name)

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    line = error_of(call("run", "--model", "deepseek_v32", *SMALL))
    assert "transformers is not installed" in line and "hisparse[transformers]" in line
