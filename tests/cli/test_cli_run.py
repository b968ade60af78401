"""`hisparse run`: its report, its exit codes, and every refusal in one line."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from cli_case import SMALL, call, call_process, error_of, report_of, small_trace

from hisparse.cli.output import Progress
from hisparse.cli.run import run
from hisparse.engine.options import RunConfig

KEYS = {
    "requests_finished", "tokens_generated", "tokens_identical", "peak_gpu_blocks_hisparse",
    "peak_gpu_blocks_resident", "concurrent_requests_hisparse", "concurrent_requests_resident",
    "spills", "pages_published", "prefix_hit_tokens", "hot_hit_rate", "host_rows_read",
    "preemptions", "events", "log_bytes", "invariants", "state_digest",
}  # fmt: skip
NUMBERS = [
    "requests", "scale", "step_ms", "gpu_blocks", "host_pool_gib", "page_size", "top_k", "hot_rows",
    "abort_rate", "preempt_rate", "spec", "seed",
]  # fmt: skip


@pytest.fixture(scope="module")
def small_report():
    return report_of(call("run", *SMALL, "--json"))


def test_json_has_the_keys_of_the_contract(small_report):
    assert set(small_report) >= KEYS
    assert small_report["requests_finished"] == 6 and small_report["spills"] > 0
    assert small_report["tokens_identical"] is True
    assert small_report["invariants"]["violations"] == []


def test_table_says_the_same_as_json(small_report):
    result = call("run", *SMALL)
    assert result.exit_code == 0 and result.stderr == ""
    table = dict(re.findall(r"^  (\S+) +(.*)$", result.stdout, re.MULTILINE))
    for name in ("spills", "events", "state_digest", "concurrent_requests_hisparse"):
        assert table[name] == str(small_report[name])
    assert table["tokens_identical"] == "yes" and table["violations"] == "0"


LITTLE = ("--requests", "8", "--gpu-blocks", "19", "--scale", "0.01", "--no-verify", "--json")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ((), "there 2 were refused that do not fit"),
        (("--gpu-blocks", "60", "--host-pool-gib", "0.0005"), "waited for host pages: raise"),
    ],
)
def test_where_fewer_are_held_than_resident_it_says_why_and_what_to_change(more, why):
    result = call("run", *LITTLE, *more)
    report = report_of(result)
    held, resident = (report[f"concurrent_requests_{name}"] for name in ("hisparse", "resident"))
    assert result.exit_code == 0 and held < resident
    assert f"held {held} requests at once, and {resident} would be all-resident" in result.stderr
    assert why in result.stderr


def test_options_map_to_fields():
    """Each option but the log's, --config and --json is one field of RunConfig, and none is left
    out but what only a file or the environment says."""
    others = {"log_dir", "log_mode", "snapshot_events", "as_json", "file"}
    options = {parameter.name for parameter in run.params} - others
    assert options == set(RunConfig.model_fields) - {"log", "more"}


def test_no_verify_checks_nothing():
    report = report_of(call("run", *SMALL, "--no-verify", "--log-mode", "off", "--json"))
    assert report["tokens_identical"] is None
    assert report["invariants"] == {"checked": [], "violations": []}


def test_aborts_are_served():
    report = report_of(call("run", *SMALL, "--abort-rate", "1", "--json"))
    assert report["requests_aborted"] > 0
    assert report["requests_aborted"] + report["requests_finished"] == 6


def test_preempted_requests_come_back_and_leave_nothing_leased():
    report = report_of(call("run", *SMALL, "--preempt-rate", "1", "--json"))
    assert report["preemptions"] > 0 and report["requests_finished"] == 6
    assert report["tokens_identical"] is True
    assert report["gpu_blocks_leased_at_end"] == report["host_pages_leased_at_end"] == 0


def test_a_replay_of_the_log_ends_where_the_report_says(tmp_path):
    report = report_of(call("run", *SMALL, "--log", tmp_path, "--json"))
    replayed = report_of(call("replay", tmp_path, "--json"))
    assert replayed["state_digest"] == report["state_digest"]
    assert replayed["seq"] == report["events"]


def test_snapshots_are_taken_as_often_as_asked_and_change_no_answer(tmp_path, small_report):
    report = report_of(
        call("run", *SMALL, "--json", "--log", tmp_path / "log", "--snapshot-events", 100)
    )
    info = report_of(call("log", "info", tmp_path / "log", "--json"))
    assert report["state_digest"] == small_report["state_digest"]
    assert 2 <= len(info["snapshots"]) <= report["events"] // 100
    middle = ("replay", tmp_path / "log", "--json", "--at", report["events"] - 10)
    near = report_of(call(*middle))
    shutil.rmtree(tmp_path / "log" / "scheduler" / "snapshots")
    assert report_of(call(*middle)) == near


def test_snapshots_without_a_log_are_refused():
    assert "--log DIR" in error_of(call("run", *SMALL, "--snapshot-events", 100))


@pytest.mark.parametrize("broken", ["tokens", "violation"])
def test_exit_code_1_if_it_does_not_verify(monkeypatch, small_report, broken):
    bad = small_report | {"tokens_identical": True, "requests_differing": []}
    if broken == "tokens":
        bad |= {"tokens_identical": False, "requests_differing": ["r3"]}
    else:
        fault = {"invariant": "one_content", "seq": 7, "message": "two pages"}
        bad |= {"invariants": {"checked": ["one_content"], "violations": [fault]}}
    monkeypatch.setattr("hisparse.engine.run.Job.run", lambda self: bad)
    result = call("run", *SMALL, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout) == bad
    assert ("r3" if broken == "tokens" else "one_content at seq 7") in result.stderr


# -- refusals --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--device", "tpu"], ["'tpu'", "use one of cpu, cuda"]),
        (["--device", "rocm"], ["ROCm is refused"]),
        (["--top-k", 64, "--hot-rows", 32], ["--hot-rows=32", "--top-k=64"]),
        (["--spec", 65], ["--spec=65", "less than or equal to 64"]),
        (["--graph"], ["--graph", "device='cpu' has no graphs", "--device cuda"]),
        (["--record-selections"], ["--record-selections=1", "--log DIR"]),
        (["--model", "glm"], ["--model='glm'", "deepseek_v32"]),
        (["--policy", "magic"], ["--policy='magic'", "use one of hybrid"]),
        (["--write-back", "never"], ["--write-back='never'", "on_pressure"]),
        (["--abort-rate", 2], ["--abort-rate=2.0", "less than or equal to 1"]),
        (["--requests", 0], ["--requests=0", "greater than 0"]),
        (["--requests", "many"], ["--requests", "'many'", "hisparse run --help"]),
        (["--host-pool-gib", "nan"], ["--host-pool-gib", "finite"]),
        (["--host-pool-gib", "inf"], ["--host-pool-gib", "finite"]),
        (["--gpu-blocks", 10**12], ["--gpu-blocks=1000000000000"]),
        (["--log", "x", "--log-mode", "ring"], ["--log-mode"]),
        (["--log-mode", "disk"], ["--log-mode", "'disk'"]),
        (["--frobnicate"], ["--frobnicate"]),
        *[
            ([f"--{name.replace('_', '-')}", -1], [f"--{name.replace('_', '-')}=-1"])
            for name in NUMBERS
        ],
    ],
)
def test_bad_option_is_one_line(args, says):
    line = error_of(call("run", *args))
    for text in says:
        assert text in line


def test_what_a_policy_of_ones_own_does_is_its_fault_and_no_violation(tmp_path, monkeypatch):
    (tmp_path / "own_policy.py").write_text(
        "from hisparse.kv.policies import Hybrid\n"
        "class NoChoice(Hybrid):\n"
        "    def victims(self, view, need):\n"
        "        return None\n"
    )
    (tmp_path / "no_policy.py").write_text("import hisparse\nhisparse.gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = error_of(call("run", *SMALL, "--policy", "own_policy:NoChoice"))
    assert "policy NoChoice: victims() returned None" in line and "(own_policy.py:3)" in line
    assert "cannot be imported (AttributeError" in error_of(call("run", "--policy", "no_policy:X"))


def test_missing_trace(tmp_path):
    line = error_of(call("run", "--trace", tmp_path / "gone.jsonl"))
    assert "gone.jsonl" in line and "No such file" in line


def test_malformed_trace_line_is_named(tmp_path):
    path = small_trace(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], '{"timestamp": 1', lines[1]]))
    assert "trace.jsonl:2:" in error_of(call("run", "--trace", path))
    path.write_text("")
    assert "no request" in error_of(call("run", "--trace", path))


@pytest.mark.parametrize(
    ("option", "small"), [("--host-pool-gib", "0.00001"), ("--gpu-blocks", "3")]
)
def test_a_pool_too_small_names_the_size_that_does(tmp_path, option, small):
    args = ["run", "--trace", small_trace(tmp_path), "--json"]
    line = error_of(call(*args, option, small))
    assert f"{option}=" in line
    size = re.search(r"use at least ([0-9.]+)$", line)
    assert size is not None, line
    report = report_of(call(*args, option, size[1]))
    assert report["requests_finished"] == 2 and report["tokens_identical"]


def test_a_used_log_directory_is_refused_untouched(tmp_path):
    args = ["run", *SMALL, "--log", tmp_path / "log"]
    assert call(*args).exit_code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "log").rglob("*") if path.is_file()}
    assert "already holds a log" in error_of(call(*args))
    after = {path: path.read_bytes() for path in (tmp_path / "log").rglob("*") if path.is_file()}
    assert before == after and before


def test_log_that_is_a_file(tmp_path):
    (tmp_path / "log").write_text("")
    assert "is a file" in error_of(call("run", "--log", tmp_path / "log"))


# -- in a process of its own -----------------------------------------------------------------------
def test_a_refusal_in_a_process(tmp_path):
    done = call_process("run", "--trace", tmp_path / "gone.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hisparse: error: ") and done.stderr.count("\n") == 1


def test_run_without_torch_says_what_to_install():
    done = call_process("run", code="import sys; sys.modules['torch'] = None")
    assert done.returncode == 2 and "hisparse[torch]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_pipe_gets_no_progress_bar():
    done = call_process("run", *SMALL, "--no-verify")
    assert (done.returncode, done.stderr) == (0, "") and "spills" in done.stdout


class Terminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_a_terminal_gets_a_bar_a_stage():
    out = Terminal()
    progress = Progress(out)
    for done in range(3):
        progress("oracle", done, 2)
        progress("oracle", done, 2)
    progress("hisparse", 1, 2)
    progress.close()
    assert out.text.count("\r") == 4 and out.text.count("\n") == 2
    assert out.text.endswith(" 1/2\n")


# -- help ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("verb", [[], ["run"], ["replay"], ["trace"], ["trace", "generate"]])
def test_help_has_an_example(verb):
    result = call(*verb, "--help")
    assert result.exit_code == 0
    example = f"Example: hisparse {' '.join(verb)}".strip()
    assert example in " ".join(result.stdout.split())


def test_help_shows_the_defaults_of_the_config():
    text = " ".join(call("run", "--help").stdout.split())
    config = RunConfig()
    assert f"attention reads. [default: {config.top_k}]" in text
    assert f"Tokens a page. [default: {config.page_size}]" in text


def test_a_log_that_nobody_would_read_again_is_not_begun(tmp_path):
    sizes = ("--page-size", 1, "--host-pool-gib", 8, "--log", tmp_path / "log")
    told = error_of(call("run", "--requests", 2, "--scale", 0.01, *sizes))
    assert "is not read again" in told and "host pages" in told
    assert not (tmp_path / "log").exists()


def test_a_host_pool_larger_than_the_machine_is_refused():
    told = error_of(call("run", "--requests", 2, "--scale", 0.01, "--host-pool-gib", 90_000))
    assert "--host-pool-gib=90000" in told
