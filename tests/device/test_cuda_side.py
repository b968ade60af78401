"""Followers' fetches on the side stream, and the three waits between it and compute.

A kernel holds one stream open until it is let go. With all waits, bytes are right and the step
does not end before its fetches. Each wait is then left out while one stream is held and the other
has done all that it was given: what goes wrong is looked at, whatever the timing.

    fetch_after_plan       compute held: side repeats the last step's plan
    copy_out_after_fetch   side held: followers copy out what is not there, and the next steps run;
                           the fetch then looks for a plan of theirs, and never ends
    resolve_after_fetch    side held: a later call of the group takes the fetch's tickets, which
                           then never ends
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from backends import hold, plain
from device_rig import (
    PAGE,
    PAGES,
    REQUESTS,
    SPAN,
    Rig,
    contents,
    expect,
    host,
    hot,
    knock_out,
    make_config,
    resident,
    spill,
    step_rows,
)
from graph_rig import TOP_K, Decode, fixed_rig, placed

from hisparse.device.cuda.kernels import CALLS_MAX
from hisparse.fsm.wire import AckKind

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

GROUP = ((0, 1, 2),)
FOLLOWERS = (1, 2)
ON_HOST = [False] * PAGES
FIRST = np.array([[0, 1, 2, 3]])  # page 0: the one hot block of a request then holds it
OTHER = np.array([[4, 5, 6, 7]])
HOT_BLOCK, PAGE_TO = 30, 45  # of request 0; a host page that nobody has
DECODED = [[0, 5, 9, 2]] * REQUESTS, [[1, 7, 4, 10]] * REQUESTS


def leave_out(rig, without):
    """The wait of that name is made by no group."""
    for group in rig.worker.groups:
        knock_out(group.leader, without)


def eager_rig(without=None):
    """Three requests, all on the host, one group. Every kernel has run: loading one may wait for
    the device."""
    rig = Rig(make_config(TOP_K, TOP_K, REQUESTS, PAGES, groups=GROUP))
    rig.begin(tables=(*placed(rig, ON_HOST), resident(2, 3, 12)))
    rig.write_page(2, 3)
    read(rig, "gather", step_rows([2]), FIRST)
    read(rig, "gather", step_rows([2]), OTHER)
    rig.end()
    rig.begin()
    read(rig, "places", step_rows([2]), OTHER)
    rig.end()
    hold(rig.device, "side")()
    rig.device.synchronize()
    leave_out(rig, without)
    return rig


def read(rig, how, rows, top_k, layers=range(3)):
    """Rows of each layer as they are copied out, or taken from the pool at the places asked for."""
    taken = {}
    for layer in layers:
        handle = rig.worker.handles[layer]
        chosen = None if layer else top_k
        if how == "gather":
            taken[layer] = handle.gather(rows, chosen).result()
            continue
        places = handle.resolve(rows, chosen).result()
        with rig.device.on_compute():
            pool = rig.device.torch.as_tensor(handle.resident.rows, device="cuda")
            taken[layer] = pool.index_select(0, places.reshape(-1)).reshape(*top_k.shape, -1)
    return taken


def right(taken, rows, top_k):
    """By layer, whether these are the rows' bytes."""
    return {layer: (plain(x) == expect(rows, top_k, layer)).all() for layer, x in taken.items()}


def ends(rig):
    """Whether the step under way is over, once the device had time for what waits for nobody."""
    time.sleep(0.02)
    return (AckKind.RETIRED, rig.step) in [(a.kind, a.ident) for a in rig.worker.poll().acks]


# -- side is held ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["gather", "places"])
def test_followers_and_the_end_of_the_step_wait_for_fetches(how):
    rig = eager_rig()
    let_go = hold(rig.device, "side")
    rig.begin()
    rows = step_rows([0])
    taken = read(rig, how, rows, FIRST, layers=[0])
    led = rig.device.compute.record()
    taken |= read(rig, how, rows, FIRST, layers=FOLLOWERS)
    rig.end()
    rig.device.synchronize(led)  # the leader waits for nobody
    ended = ends(rig)
    let_go()
    rig.device.synchronize()
    assert not ended and ends(rig)
    assert all(right(taken, [0], FIRST).values())


@pytest.mark.parametrize("how", ["gather", "places"])
def test_without_their_wait_followers_read_what_is_not_there_and_the_step_ends(how):
    rig = eager_rig(without="copy_out_after_fetch")
    let_go = hold(rig.device, "side")
    rig.begin()
    taken = read(rig, how, step_rows([0]), FIRST)
    rig.end()
    ended = ends(rig)
    let_go()
    rig.device.synchronize()
    assert ended
    assert right(taken, [0], FIRST) == {0: True, 1: False, 2: False}


def handed_on(rig, later, patience):
    """Request 0 reads through its hot block while side is held; a step later the block is request
    1's, resident, with its page 0; a step after that it is read, or copied to the host. Returns
    (whether the last step ended before side was let go, whether side then ended by itself, whether
    the block held page 0 by layer)."""
    let_go = hold(rig.device, "side")
    rig.begin()
    read(rig, "gather", step_rows([0]), FIRST, layers=[0])
    call = call_of(rig)
    read(rig, "gather", step_rows([0]), FIRST, layers=FOLLOWERS)
    rig.end()
    rig.begin(resets=(0,), tables=(resident(1, 0, HOT_BLOCK),))
    rig.write_page(1, 0)
    rig.end()
    copies = (spill(1, HOT_BLOCK, PAGE_TO),) if later == "spill" else ()
    rig.begin(transfers=copies)
    taken = {} if copies else read(rig, "gather", step_rows([1]), FIRST)
    rig.end()
    ended = ends(rig)
    let_go()
    alone = side_ends(rig.device, patience)
    if not alone:
        say_nothing_misses(rig, call)
    rig.device.synchronize()
    if not copies:
        return ended, alone, right(taken, [1], FIRST)
    pages = {x: rig.worker.handles[x].runtime.host.array[PAGE_TO] for x in rig.layers}
    return ended, alone, {x: (y == contents(1, x, range(PAGE))).all() for x, y in pages.items()}


@pytest.mark.parametrize("later", ["read", "spill"])
def test_the_steps_after_wait_for_fetches_too(later):
    ended, alone, found = handed_on(eager_rig(), later, patience=3)
    assert not ended and alone and all(found.values())


def test_without_the_wait_a_fetch_outlives_its_step_and_never_ends():
    """It looks for the plan of the step that has begun by then."""
    ended, alone, _ = handed_on(eager_rig(without="copy_out_after_fetch"), "spill", patience=0.3)
    assert ended and not alone


def call_of(rig):
    """Of the plan that is under way."""
    return rig.worker.groups[0].leader._open[0].parts[0].call


def side_ends(device, seconds):
    until = time.monotonic() + seconds
    while not device.side.torch.query() and time.monotonic() < until:
        time.sleep(0.001)
    return device.side.torch.query()


def say_nothing_misses(rig, call):
    """Let a fetch end that waits for a plan of this step: no line of it misses anything."""
    device = rig.device
    epoch = rig.step * CALLS_MAX + call.ordinal
    count = np.full(call.lines, epoch << 32, np.uint64)
    with device.d2h.current():
        device.copy(call.count.data.ptr, device.d2h.staging.put(count), count.nbytes)
    assert side_ends(device, 5)


# -- compute is held ------------------------------------------------------------------------------


def decode_behind_held_compute(rig, without=None):
    """A step of fixed shape, not replayed, all of it queued behind a kernel that holds compute, but
    for what side does. (bytes are right by layer, whether side had ended before compute began)"""
    rig.run_step(tables=placed(rig, [False] * (PAGES - 1) + [True]))
    decode, requests = Decode(rig), list(range(REQUESTS))
    for top_k in DECODED:
        decode.load(requests, [SPAN - 1] * REQUESTS, top_k)
        rig.device.synchronize()
        last = top_k is DECODED[1]
        if last:
            leave_out(rig, without)
            let_go = hold(rig.device, "compute")
        rig.begin()
        with rig.device.on_compute():
            decode.queue()
        rig.end()
    early = side_ends(rig.device, 5 if without else 0.02)
    let_go()
    rig.device.synchronize()
    return right(decode.out, requests, np.array(DECODED[1])), early


def test_fetches_wait_for_their_plan():
    found, early = decode_behind_held_compute(fixed_rig())
    assert all(found.values()) and not early


def test_without_that_wait_followers_repeat_the_last_plan():
    rig = fixed_rig()
    leaders = {group[0] for group in rig.config.layout.index_groups}
    found, early = decode_behind_held_compute(rig, without="fetch_after_plan")
    assert early and found == {layer: layer in leaders for layer in rig.layers}


# -- calls that overlap ---------------------------------------------------------------------------

MANY = 16  # requests: more than have a warp for each of their first misses


def overlapping_calls(without=None):
    """A leader resolves twice before its followers come, all misses, while side is held. Returns
    (whether compute went on, whether the fetch then ended by itself, bytes are right by call)."""
    config = make_config(TOP_K, TOP_K, MANY, PAGES, blocks=32, hosts=80, groups=GROUP)
    rig, rows = Rig(config), step_rows(range(MANY))
    tables = []
    for row in range(MANY):
        pages = range(1 + row * PAGES, 1 + (row + 1) * PAGES)
        for page, ident in enumerate(pages):
            rig.put("host", row, page, ident)
        tables += [host(row, 0, *pages), hot(row, 1 + row)]
    asked = [np.repeat(x, MANY, axis=0) for x in (FIRST, OTHER)]
    handles = rig.worker.handles

    def overlap():
        taken = [{0: handles[0].gather(rows, top_k).result()} for top_k in asked]
        event = rig.device.compute.record()
        return taken, event

    def follow(taken):
        for layer in FOLLOWERS:
            for made in taken:
                made[layer] = handles[layer].gather(rows).result()

    rig.begin(tables=tuple(tables))
    follow(overlap()[0])  # every kernel has run
    rig.end()
    rig.device.synchronize()
    leave_out(rig, without)
    let_go = hold(rig.device, "side")
    rig.begin(resets=range(MANY), tables=tuple(tables))
    taken, led = overlap()
    time.sleep(0.02)  # what waits for nobody has happened then
    went_on = led.made.query()
    let_go()
    ended = side_ends(rig.device, 0.3 if without else 3)
    if not ended:
        open_tickets_again(rig)
    follow(taken)
    rig.end()
    rig.device.synchronize()
    found = [right(x, range(MANY), top_k) for x, top_k in zip(taken, asked, strict=True)]
    return went_on, ended, found


def open_tickets_again(rig):
    """Give a fetch that lost its tickets new ones, from another stream, so that it ends."""
    group, call = rig.worker.groups[0].leader, call_of(rig)
    for _ in range(1000):
        with rig.device.d2h.current():
            for member in FOLLOWERS:
                group._resolver.reopen(call, member)
        if side_ends(rig.device, 0.01):
            return
    raise AssertionError("the fetch does not end")


def test_a_later_call_waits_for_the_fetches_of_an_older_one():
    went_on, ended, found = overlapping_calls()
    assert not went_on and ended
    assert all(all(layers.values()) for layers in found)


def test_without_that_wait_the_older_fetch_loses_its_tickets_and_never_ends():
    went_on, ended, _ = overlapping_calls(without="resolve_after_fetch")
    assert went_on and not ended


# -- a step that fails midway ---------------------------------------------------------------------


def test_a_dummy_step_that_fails_midway_leaves_no_fetch_behind():
    """A late one would look for a plan of the step that has begun by then, and wait for ever."""
    rig = fixed_rig()
    rig.run_step(tables=placed(rig, [False] * (PAGES - 1) + [True]))
    decode, requests = Decode(rig), list(range(REQUESTS))
    with rig.worker.warm_up(1), rig.device.on_compute():
        decode.queue()
    hold(rig.device, "side", 200)
    with pytest.raises(ZeroDivisionError), rig.worker.warm_up(1), rig.device.on_compute():
        rig.worker.handles[0].gather(decode.step_rows, decode.top_k)
        raise ZeroDivisionError("a model that fails behind its first layer")
    assert rig.device.side.torch.query()
    for top_k in DECODED:
        rig.begin()
        decode.load(requests, [SPAN - 1] * REQUESTS, top_k)
        with rig.device.on_compute():
            decode.queue()
        rig.end()
        assert all(right(decode.out, requests, np.array(top_k)).values())
    rig.device.synchronize()
