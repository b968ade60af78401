"""`hisparse config` shows what holds and who said it; `hisparse run` takes the same sources."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_case import call, error_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
ENGINE = """
[layout]
row_bytes = 656
index_row_bytes = 132
index_groups = [[0]]
[pools]
gpu_blocks = 300
host_pool_gib = 0.01
[policy]
top_k = 16
hot_rows = 64
[schedule]
max_model_len = 257
"""
RUN = """
[run]
requests = 2
scale = 0.01
[pools]
host_pool_gib = 0.125
[policy]
watermark_blocks = 2
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "hisparse.toml"
    path.write_text(ENGINE)
    return path


def test_every_value_is_shown_with_who_said_it(file, monkeypatch):
    monkeypatch.setenv("HISPARSE_CHECKS", "on")
    shown = call("config", file, "--set", "pools.gpu_blocks=400").stdout.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in shown}
    assert rows["pools.gpu_blocks"] == ["400", "argument"]
    assert rows["checks"] == ["on", "HISPARSE_CHECKS"]
    assert rows["schedule.max_model_len"] == ["257", str(file)]
    assert rows["policy.write_back"] == ["eager", "default"]
    assert rows["pools.index_pages_per_block"][1] == "chosen"
    assert rows["block_bytes"][1] == "computed"


def test_the_json_is_a_configuration_again(file, tmp_path):
    report = json.loads(call("config", file, "--json").stdout)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(report["config"]))
    assert json.loads(call("config", again, "--json").stdout)["config"] == report["config"]
    assert report["origins"]["ranks"] == "default" and report["sizes"]["max_pages"] == 5


def test_what_a_gpu_needs_beside_its_pools_is_told_where_one_can_take_the_config(file):
    fits = json.loads(call("config", file, "--set", "layout.row_bytes=656", "--json").stdout)
    assert fits["sizes"]["cuda_state_bytes"] > 0 < fits["sizes"]["cuda_call_bytes"]
    odd = json.loads(call("config", file, "--set", "layout.row_bytes=650", "--json").stdout)
    assert "cuda_state_bytes" not in odd["sizes"] and odd["sizes"]["block_bytes"] > 0


@pytest.mark.parametrize(
    ("setting", "pages", "field"),
    [
        ("schedule.max_requests=1", 5, "schedule.max_requests"),
        ("pools.host_pool_gib=0.0005", 11, "pools.host_pool_gib"),
        ("pools.gpu_blocks=14", 15, "pools.gpu_blocks"),
    ],
)
def test_the_least_of_gpu_host_and_workload_is_named(file, setting, pages, field):
    settings = ("config", file, "--set", "schedule.max_requests=8", "--set", setting)
    planned = json.loads(call(*settings, "--json").stdout)["planned"]
    assert planned["bound_by"] == field and planned["host_pages"][field] == pages
    (line,) = [x for x in call(*settings).stdout.splitlines() if x.startswith("host_pages_planned")]
    assert line.split(maxsplit=2)[1:] == [str(pages), line[line.index("bound by") :]]
    assert line.endswith(")") and f"bound by {field} (of pools.gpu_blocks " in line


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("layout.row_bytes=650", "layout.row_bytes=650: .* use 656"),
        ("pools.host_pool_gib=900000", r"pools.host_pool_gib=900000: \d+ rows, .* use at most \d+"),
    ],
)
def test_what_the_cuda_backend_will_refuse_is_told(file, setting, why):
    fits = ("config", file, "--set", "layout.row_bytes=656")
    assert json.loads(call(*fits, "--json").stdout)["refused"] == {}
    report = json.loads(call(*fits, "--set", setting, "--json").stdout)
    assert re.match(why, report["refused"]["cuda"])
    last = call(*fits, "--set", setting).stdout.splitlines()[-1].split(maxsplit=2)
    assert last == ["cuda", "refused", report["refused"]["cuda"]]


def test_row_checksums_are_told_and_told_when_there_are_too_many(file):
    """4 bytes a request row, layer and position."""
    for more, taken, refused in (
        (("checks=off",), False, False),
        (("checks=on",), True, False),
        (("checks=on", "schedule.max_requests=300000"), False, True),
    ):
        settings = [part for setting in more for part in ("--set", setting)]
        sizes = json.loads(call("config", file, *settings, "--json").stdout)["sizes"]
        said = sizes["checksum_bytes"], sizes["checksum_bytes_refused"]
        assert (said[0] > 0, said[1] > 0) == (taken, refused)


def test_every_fault_is_one_line_and_exit_2(file):
    text = error_of(call("config", file, "--set", "pools.gpu_block=4", "--set", "ranks=0"))
    assert "did you mean pools.gpu_blocks?" in text and "ranks='0' (from argument)" in text
    assert "give SECTION.FIELD=VALUE" in error_of(call("config", file, "--set", "ranks"))


def test_what_is_required_is_told_once_with_how_to_give_it(file, monkeypatch):
    text = error_of(call("config"))
    assert "layout: Field required (row_bytes, index_row_bytes, index_groups); pools" in text
    assert text.endswith(
        "; give what is required in FILE, as --set SECTION.FIELD=VALUE or as "
        "HISPARSE_SECTION__FIELD=VALUE in the environment"
    )
    file.write_text(ENGINE.replace("host_pool_gib", "host_pool_gi"))
    text = error_of(call("config", file))
    assert text.count("Field required") == 1 and "did you mean pools.host_pool_gib?" in text


def test_an_unknown_section_is_told_with_who_said_it(file, monkeypatch):
    monkeypatch.setenv("HISPARSE_SCHEDUL__STEP_ROWS", "8")
    text = error_of(call("config", file, "--set", "foo.bar=1"))
    assert "schedul (from HISPARSE_SCHEDUL__STEP_ROWS): no such key: did you mean schedule?" in text
    assert "foo (from argument): no such key: known are layout" in text


def test_a_run_takes_file_environment_and_options_in_that_order(tmp_path, monkeypatch):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    monkeypatch.setenv("HISPARSE_POLICY__HOT_ROWS", "48")
    monkeypatch.setenv("HISPARSE_RUN__REQUESTS", "3")
    log = tmp_path / "log"
    result = call("run", "--config", path, "--requests", "1", "--log", log, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["requests"] == 1
    (segment,) = (log / "scheduler").glob("*.seg")
    header = segment.read_bytes()[:4000]
    for held in (b'"host_pool_gib":0.125', b'"watermark_blocks":2', b'"hot_rows":48'):
        assert held in header


def test_the_documented_files_are_an_engines_and_a_runs(tmp_path):
    engines, runs = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    path = tmp_path / "hisparse.toml"
    path.write_text(engines)
    assert call("config", path).exit_code == 0
    assert "takes no schedule.max_model_len" in error_of(call("run", "--config", path))
    path.write_text(runs)
    result = call("run", "--config", path, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["requests"] == 8


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[run]\nseeds = 1", "run.seeds (from FILE): no such key: did you mean run.seed?"),
        ("[pools]\ngpu_block = 9", "no such key: did you mean pools.gpu_blocks?"),
        ("[run]\nscale = 7", "run.scale=7 (from FILE): Input should be less than or equal to 1"),
        ("[run]\nmore = 1", "run.more (from FILE): no such key"),
        ("ranks = 2", "takes no ranks, it has one rank: leave it out"),
        ("[layout]\nrow_bytes = 656", "takes no layout, the model has one"),
        ("pools = 3", "pools (from FILE): is a section: give fields of it"),
        ("[policy]\nname = 'resident'", "has no host tier to run"),
    ],
)
def test_what_a_run_cannot_take_is_refused_by_name(tmp_path, text, says):
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert says.replace("FILE", str(path)) in error_of(call("run", "--config", path))


def test_a_section_that_a_run_does_not_take_is_refused_once(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("ranks = 2\n[layout]\nrow_bytes = 1\nindex_row_bytes = 9\nindex_groups = [[7]]")
    error = error_of(call("run", "--config", path))
    assert error.count("takes no layout") == error.count("takes no ranks") == 1


FAULTS: list[dict[str, dict[str, object] | object]] = [
    {"pools": {"gpu_block": 9}},
    {"pools": {"page_size": 0}},
    {"pools": {"index_pages_per_block": -1}},
    {"policy": {"name": "magic"}},
    {"policy": {"hot_rows": 8}},  # below the default of top_k
    {"policy": {"promote_pages": -1}},
    {"schedule": {"max_requests": 0}},
    {"schedule": {"max_model_len": 9}},
    {"schedule": {"step_rows": 1 << 40}},  # what no machine has
    {"log": {"mode": "disk"}},
    {"log": {"snapshot_events": -1}},
    {"suffix": {"name": "gpu"}},
    {"layout": {"row_bytes": 1}},
    {"ranks": 2},
    {"run": {"scal": 1}},
    {"run": {"requests": 0}},
    {"run": {"device": "tpu"}},
    {"run": {"model": "glm"}},
]


def told(tmp_path, monkeypatch, source, faults):
    """What `run` says of them, all in one file or all in the environment."""
    data: dict[str, object] = {}
    with monkeypatch.context() as here:
        for fault in faults:
            ((section, part),) = fault.items()
            fields = part.items() if isinstance(part, dict) else [("", part)]
            data[section] = data.get(section, {}) | part if isinstance(part, dict) else part
            for name, value in fields:
                variable = f"HISPARSE_{section}__{name}".upper().removesuffix("__")
                if source == "environment":
                    here.setenv(variable, str(value))
        path = tmp_path / "run.json"
        path.write_text(json.dumps(data if source == "file" else {}))
        return error_of(call("run", "--config", path)).removeprefix("hisparse: error: ")


@pytest.mark.parametrize("source", ["file", "environment"])
def test_the_faults_of_all_sections_are_told_at_once_as_each_alone_is(
    tmp_path, monkeypatch, source
):
    alone = [told(tmp_path, monkeypatch, source, [fault]) for fault in FAULTS]
    together = told(tmp_path, monkeypatch, source, FAULTS)
    assert [text for text in alone if text not in together] == []
    assert together.count("; ") == sum(text.count("; ") for text in alone) + len(FAULTS) - 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": "glm_moe_dsa", "spec": 2, "graph": True, "device": "cuda"},
         ["no draft head", "no decode step of fixed shape", "batch-invariant on the CPU"]),
        ({"graph": True, "record_selections": 2}, ["has no graphs", "needs a log on disk"]),
    ],
)  # fmt: skip
def test_fields_that_do_not_go_together_are_told_at_once(tmp_path, fields, says):
    (tmp_path / "run.json").write_text(json.dumps({"run": fields}))
    error = error_of(call("run", "--config", tmp_path / "run.json"))
    assert [text for text in says if text not in error] == []


def test_a_value_that_an_option_replaces_is_not_the_files(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        "[pools]\npage_size = 0\n[log]\nsnapshot_events = -1\n[schedule]\nstep_rows = 0"
    )
    error = error_of(call("run", "--config", path, "--page-size", "-4", "--log", tmp_path / "log",
                          "--snapshot-events", "5"))  # fmt: skip
    assert "--page-size=-4: Input" in error and "snapshot_events" not in error
    assert f"schedule.step_rows=0 (from {path}): Input" in error
