"""Steps that are captured once and replayed, and what a step waits for: nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from backends import hold, plain, value
from device_rig import (
    PAGES,
    REQUESTS,
    SPAN,
    expect,
    host,
    spill,
    step_rows,
)
from graph_rig import KERNEL_NODE, STATES, TOP_K, Decode, fixed_rig, placed

from hisparse.device.cuda.group import EPOCH_STEPS
from hisparse.errors import UsageError
from hisparse.fsm.wire import AckKind

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


def test_one_captured_graph_serves_all_resident_mixed_and_all_host_batches():
    rig = fixed_rig()
    decode, rng = Decode(rig), np.random.default_rng(1)
    nodes = []
    for on_gpu in STATES.values():
        rig.run_step(tables=placed(rig, on_gpu))
        nodes.append(decode.capture()[0])
    assert nodes[0] == nodes[1] == nodes[2]
    for on_gpu in STATES.values():
        rig.run_step(resets=range(REQUESTS), tables=placed(rig, on_gpu))
        for _ in range(8):
            rows = rng.permutation(REQUESTS)
            rows[rng.random(REQUESTS) < 0.2] = -1
            top = rng.integers(-1, SPAN, (REQUESTS, TOP_K))
            out = decode.run(rows.tolist(), [SPAN - 1] * REQUESTS, top)
            live = np.where((rows >= 0)[:, None], top, -1)
            for layer in rig.layers:
                assert (out[layer] == expect(np.maximum(rows, 0), live, layer)).all()
    rig.device.synchronize()


def test_the_wrapper_launches_what_the_kernels_are_and_nothing_else():
    """Groups of three layers and of one: a resolve each, a fetch a follower, and of each layer one
    write and one copy out. Waits between streams are edges of the graph, not nodes."""
    rig = fixed_rig()
    rig.run_step(tables=placed(rig, STATES["mixed"]))
    nodes, launches = Decode(rig).capture()
    resolves, fetches, layers = 2, 2, 4
    assert nodes == [KERNEL_NODE] * (resolves + fetches + 2 * layers)
    assert launches == len(nodes)


def test_rows_of_a_draft_are_resolved_in_order_and_padding_lines_touch_nothing():
    rig = fixed_rig()
    rig.run_step(tables=placed(rig, STATES["all on the host"]))
    decode, rng = Decode(rig, span=3), np.random.default_rng(2)
    decode.capture()
    for _ in range(8):
        drafts = rng.integers(1, 4, REQUESTS)
        rows = np.concatenate([[r] * d + [-1] * (3 - d) for r, d in enumerate(drafts)])
        positions = np.tile([SPAN - 3, SPAN - 2, SPAN - 1], REQUESTS)
        top = rng.integers(-1, SPAN - 3, (3 * REQUESTS, TOP_K))  # of padding lines too
        out = decode.run(rows.tolist(), positions.tolist(), top)
        live = np.where((rows >= 0)[:, None], top, -1)
        for layer in rig.layers:
            assert (out[layer] == expect(np.maximum(rows, 0), live, layer)).all()
    rig.device.synchronize()


def test_epochs_come_round_and_nothing_of_the_last_round_is_taken_for_new():
    rig = fixed_rig()
    rig.run_step(tables=placed(rig, STATES["all on the host"]))
    decode, rng = Decode(rig), np.random.default_rng(6)
    decode.capture()
    for ahead in (0, EPOCH_STEPS - 1):  # the next epoch is that of the last step
        rig.step += ahead
        for _ in range(4):
            rows, top = [0, 1, 2], rng.integers(0, SPAN, (REQUESTS, TOP_K))
            out = decode.run(rows, [SPAN - 1] * REQUESTS, top)
            for layer in rig.layers:
                assert (out[layer] == expect(rows, top, layer)).all()
    rig.device.synchronize()


def test_a_fixed_step_that_does_not_fit_is_refused():
    rig = fixed_rig()
    rig.run_step()
    rig.begin()
    decode = Decode(rig, span=4)
    with pytest.raises(UsageError, match=r"span \* top_k \(4\) at most hot_rows \(12\)"):
        rig.worker.handles[1].gather(decode.step_rows, decode.top_k)
    with pytest.raises(UsageError, match=r"takes top_k int32\[12, 4\]"):
        rig.worker.handles[1].gather(decode.step_rows, decode.top_k[:, :2])


@pytest.mark.parametrize("name", ["rows", "positions"])
def test_arrays_of_a_fixed_step_that_kernels_would_misread_are_refused_by_every_verb(name):
    """Every other element of an array, as a column has; and numbers of another size."""
    rig = fixed_rig()
    rig.run_step(tables=placed(rig, STATES["all on the host"]))
    rig.begin()
    decode = Decode(rig)
    leader, index = rig.worker.handles[1], rig.worker.index
    verbs = (
        lambda rows: leader.write(rows, decode.data[1]),
        lambda rows: leader.gather(rows, decode.top_k),
        lambda rows: leader.resolve(rows, decode.top_k),
        lambda rows: index.write(0, rows, np.zeros((REQUESTS, 3), np.uint8)),
        lambda rows: index.prefixes(0, rows, SPAN),
    )
    array = getattr(decode, name)
    for wrong, said in (
        (array.repeat_interleave(2)[::2], f"{name} must be contiguous"),
        (array.short(), f"{name} must be int"),
    ):
        for verb in verbs:
            with pytest.raises(UsageError, match=said):
                verb(replace(decode.step_rows, **{name: wrong}))


def test_decode_waits_for_nothing():
    """A hundred steps, replayed and eager, with the synchronising calls of torch made errors."""
    import torch

    rig = fixed_rig()
    decode, rng = Decode(rig), np.random.default_rng(3)
    rig.run_step(tables=placed(rig, STATES["mixed"]))
    decode.capture()
    rows, positions = [0, 1, 2], [SPAN - 1] * REQUESTS
    decode.run(rows, positions, rng.integers(-1, SPAN, (REQUESTS, TOP_K)))
    eager = step_rows(rows)
    rig.device.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(100):
            rig.begin(tables=(host(0, 3, 40 + step % 2),), fences=())
            if step % 2:
                rig.gather(eager, rng.integers(0, SPAN, (REQUESTS, TOP_K)))
            else:
                with rig.device.on_compute():
                    decode.graph.replay()
            rig.end()
            rig.worker.poll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rig.device.synchronize()
    assert rig.device.statistics()["staging_waits"] == 0


@pytest.mark.parametrize("how", ["replayed", "eager"])
def test_steps_are_queued_while_the_device_stands_still(how):
    """By calls of CuPy too, of which the mode above knows nothing: were one of them to wait, the
    kernel that holds compute would have run out of time by then."""
    rig = fixed_rig()
    decode, rows = Decode(rig), [0, 1, 2]
    top = np.random.default_rng(8).integers(0, SPAN, (REQUESTS, TOP_K))
    rig.run_step(tables=placed(rig, STATES["mixed"]))
    decode.capture()
    decode.load(rows, [SPAN - 1] * REQUESTS, top)
    eager, taken = step_rows(rows), {}

    def step(number):
        copy = spill(number, PAGES, 50 + number)  # of the last page of the first request
        rig.begin(tables=(host(0, 3, 40 + number % 2),), transfers=(copy,))
        if how == "eager":
            taken.update(rig.gather(eager, top))
        else:
            with rig.device.on_compute():
                decode.graph.replay()
            taken.update(decode.out)
        rig.end()
        return rig.worker.poll().acks

    for number in (1, 2, 3):  # kernels are loaded, buffers there
        step(number)
    hold(rig.device, "compute")()
    rig.device.synchronize()
    rig.worker.poll()
    let_go = hold(rig.device, "compute")
    held = rig.device.compute.record()
    told = [step(number) for number in (4, 5, 6)][-1]
    waited = held.made.query()
    let_go()
    rig.device.synchronize()
    assert not waited and rig.device.statistics()["staging_waits"] == 0
    assert max(ack.ident for ack in told if ack.kind == AckKind.RETIRED) == rig.step - 3
    for layer, found in taken.items():
        data = value(found) if how == "eager" else plain(found)
        assert (data == expect(rows, top, layer)).all()
