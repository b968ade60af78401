"""Decode on a GPU, eager and replayed: tokens, logits and rows are those of the oracle there."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from serving_rig import LONGEST, OPEN, assert_identical, prompt, serve

from hisparse.device import open_device
from hisparse.device.rows import StepRows
from hisparse.engine.accelerator import Fetch, forbid_waiting, upload
from hisparse.engine.builtin import BuiltinModel
from hisparse.engine.options import RunConfig
from hisparse.engine.reference import DenseCache, reference_decode_many
from hisparse.engine.run import Job
from hisparse.engine.selections import read_selections
from hisparse.engine.trace import WorkloadRequest, write_trace
from hisparse.engine.trace_generate import generate_trace
from hisparse.errors import ConfigError
from hisparse.fsm.wire import Table

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def unpinned():
    yield
    while OPEN:
        OPEN.pop().shutdown()


CROWD = [WorkloadRequest(f"q{i}", 0.0, prompt(i, 40 + 9 * i), 20) for i in range(5)]
ERROR = 2  # of torch.cuda.get_sync_debug_mode
SMALL = {"requests": 12, "scale": 0.02, "page_size": 8, "top_k": 16, "hot_rows": 64}


def decoder(spec=0, device="cuda"):
    return BuiltinModel(
        seed=11, top_k=16, max_model_len=LONGEST + spec, draft=spec > 0, device=device
    )


def oracle(device):
    found = reference_decode_many(
        decoder(device=device),
        [work.prompt for work in CROWD],
        [work.max_new for work in CROWD],
        chunk=32,
    )
    return {work.request: result for work, result in zip(CROWD, found, strict=True)}


@pytest.fixture(scope="module")
def expected():
    return oracle("cuda")


def test_the_bits_of_a_gpu_are_those_of_the_cpu(expected):
    for name, want in oracle("cpu").items():
        got = expected[name]
        assert got.tokens == want.tokens
        assert got.logits.tobytes() == want.logits.tobytes()
        assert got.rows.tobytes() == want.rows.tobytes()


@pytest.mark.parametrize("spec", [0, 3])
@pytest.mark.parametrize("fixed", [False, True], ids=["eager", "graph"])
def test_tokens_and_logits_are_the_oracles(expected, spec, fixed):
    engine, replica = serve(
        decoder(spec), CROWD, spec=spec, fixed=fixed, hot_rows=64, device=open_device("cuda")
    )
    assert_identical(engine, expected)
    assert replica.coordinator.metrics.counts["spills"] > 0
    assert replica.worker.statistics()["host_rows"] > 0
    assert engine.runner.steps["eager"] > 0 and (engine.runner.steps["fixed"] > 20) == fixed


def test_one_graph_serves_resident_mixed_and_host_batches(tmp_path):
    arrivals = generate_trace(
        8,
        seed=3,
        requests_per_s=4,
        median_input=3000,
        sigma_input=0.4,
        median_output=3000,
        sigma_output=0.1,
        followups=0,
    )
    write_trace(tmp_path / "load.jsonl", arrivals)
    options = RunConfig(
        device="cuda",
        graph=True,
        trace=tmp_path / "load.jsonl",
        requests=8,
        scale=0.02,
        step_ms=1,
        page_size=8,
        gpu_blocks=60,
        record_selections=1,
        log={"mode": "disk", "dir": tmp_path / "log"},
    )
    report = Job(options).run()
    assert report["tokens_identical"] is True and not report["invariants"]["violations"]
    assert report["steps_replayed"] > 100 and report["graphs_captured"] <= 4
    prompts, hosted = set(), {}
    for taken in read_selections(tmp_path / "log").taken:
        if len(taken.selected) > 4 * taken.top_k:
            prompts.add(taken.step)
        off_gpu = hosted.setdefault(taken.step, {}).setdefault(taken.request, [])
        off_gpu.append(taken.hits + taken.misses > 0)
    kinds = set()
    for step in hosted.keys() - prompts:
        if len(hosted[step]) in (3, 4):  # the graph with room for four
            read = [off for request in hosted[step].values() for off in request]
            kinds.add("host" if all(read) else "mixed" if any(read) else "resident")
    assert kinds == {"resident", "mixed", "host"}


def test_a_graph_has_as_many_nodes_whatever_the_batch_when_it_is_captured():
    nodes, tables = [], set()

    def captured(engine):
        """The same shape, captured anew after a step, whoever has rows of the tables then."""
        fixed, worker = engine.runner.fixed, engine.runner.cache.worker
        if fixed.shapes and len(nodes) < 20:
            with worker.device.on_compute():
                fixed._make(4, 1)
            nodes.append(fixed._capture.nodes[-1])
            tables.add(Fetch(torch.as_tensor(worker.tables[Table.RESIDENT])).result()[0].tobytes())

    device = open_device("cuda")
    _, replica = serve(decoder(), CROWD, fixed=True, device=device, after_step=captured)
    assert replica.worker.statistics()["host_rows"] > 0
    assert len(nodes) == 20 and len(set(nodes)) == 1 and len(tables) > 5


def test_every_row_that_a_replay_reads_is_seen(expected):
    seen = []
    device = open_device("cuda")
    engine, _ = serve(
        decoder(), CROWD[:3], fixed=True, device=device, check=lambda *a: seen.append(a)
    )
    assert_identical(engine, expected)
    for _, rows, top_k, data in seen:
        assert (rows.rows >= 0).all() and len(rows.rows) == len(top_k) == len(data)
        assert not data[top_k < 0].any()
    sizes = [len(rows.rows) for layer, rows, _, _ in seen if layer == 0]
    assert (
        engine.runner.steps["fixed"] > 0
        and 3 in sizes
        and len(sizes) == sum(engine.runner.steps.values())
    )


def test_a_step_that_waits_for_the_device_is_refused():
    values = torch.arange(4, device="cuda")
    with forbid_waiting(values.device), pytest.raises(RuntimeError, match="synchroniz"):
        values.sum().item()
    with forbid_waiting(values.device):
        fetch = Fetch(values * 2)
    assert fetch.result()[0].tolist() == [0, 2, 4, 6]


def test_a_forward_pass_waits_for_nothing():
    model = decoder()
    cache, rows = DenseCache(model.layout, "cuda"), StepRows(np.zeros(40, np.int32), np.arange(40))
    cache.begin(rows)
    with forbid_waiting(model.device):
        logits = model.forward(prompt(0, 40), rows, cache)
        fetch = Fetch(model.choose(logits[upload(np.array([39]), model.device)]))
    assert fetch.result()[0].shape == (1,)


@pytest.mark.parametrize("fixed", [False, True], ids=["eager", "graph"])
def test_every_pass_over_the_layers_runs_where_waiting_raises(fixed):
    model, modes = decoder(), []

    def watched(inner, *call):
        modes.append(torch.cuda.get_sync_debug_mode())
        return inner(*call)

    model.forward = partial(watched, model.forward)
    model.forward_fixed = partial(watched, model.forward_fixed)
    engine, _ = serve(model, CROWD[:2], fixed=fixed, device=open_device("cuda"))
    made = 2 * len(engine.runner.fixed.shapes) if fixed else 0  # warm-up and capture may wait
    assert modes.count(ERROR) == engine.runner.steps["eager"] > 0
    assert len(modes) == modes.count(ERROR) + made


OTHERS = {"suffix": "cpu", "suffix_gib": 0.001, "preempt_rate": 0.4, "abort_rate": 0.2}


@pytest.mark.parametrize(
    "options",
    [{}, {"graph": True, "spec": 3}, {"graph": True, "spec": 1} | OTHERS],
    ids=["eager", "graph-drafts", "graph-drafts-suffix-preempted-aborted"],
)
def test_a_run_verifies_all_that_it_verifies_on_cpu(options, tmp_path):
    log = {"mode": "disk", "dir": tmp_path}
    report = Job(RunConfig(device="cuda", log=log, **SMALL, **options)).run()
    assert report["tokens_identical"] is True and report["host_rows_read"] > 0
    assert report["invariants"]["violations"] == []
    checked = set(report["invariants"]["checked"])
    assert {"content", "table_truth", "replay_equal", "always_readable"} <= checked
    assert ("steps_replayed" in report) == ("graph" in options)
    assert report["gpu_blocks_leased_at_end"] == report["host_pages_leased_at_end"] == 0


def test_recorded_selections_are_those_of_the_cpu(tmp_path):
    selected = {}
    for device, graph in (("cpu", False), ("cuda", True)):
        here = tmp_path / f"{device} {graph}"
        log = {"mode": "disk", "dir": here}
        options = RunConfig(device=device, graph=graph, record_selections=1, log=log, **SMALL)
        report = Job(options).run()
        taken = read_selections(here).taken
        misses = sum(each.misses for each in taken)
        assert misses == report["hot_misses"] and all(each.hits >= 0 for each in taken)
        selected[device, graph] = {
            (each.request, each.group, each.start + i): row.tobytes()
            for each in taken
            for i, row in enumerate(np.frombuffer(each.selected, "<i4").reshape(-1, each.top_k))
        }
    plain = selected.pop(("cpu", False))
    for found in selected.values():
        both = plain.keys() & found.keys()  # a prefix hit computes fewer rows, and these depend
        assert len(both) > 0.8 * len(plain) and all(plain[key] == found[key] for key in both)


def test_verification_rows_that_no_hot_region_holds_are_refused():
    with pytest.raises(ConfigError, match=r"hot_rows=64.* at least 80"):
        Job(RunConfig(device="cuda", graph=True, spec=4, **SMALL))
