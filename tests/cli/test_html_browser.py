"""The exported page in a real browser: what it draws, and what it says, is what the verbs say.

Needs Chromium and its driver (Debian: `apt-get install chromium chromium-driver`) and selenium.
Without them these tests are skipped, unless HISPARSE_BROWSER=required, as in CI: then they fail.
"""

from __future__ import annotations

import json
import os
import random

import pytest
from cli_case import call
from damaged_logs import GAP_TO, make_logs
from log_case import clean_events, write_log
from test_cli_export_html import HOSTILE

from hisparse.bench.browser import browser, missing, run, settle, show
from hisparse.cli.export import page_of
from hisparse.cli.opening import open_history
from hisparse.fsm import events as ev
from hisparse.fsm.fold import evolve
from hisparse.fsm.state import State
from hisparse.fsm.watch import facts, target

WHATS = {"block": "block", "page": "host-page", "request": "request", "transfer": "transfer"}

if missing() and os.environ.get("HISPARSE_BROWSER") != "required":
    pytest.skip(f"no browser: {missing()}", allow_module_level=True)


@pytest.fixture(scope="module")
def driver():
    with browser(width=1300, height=900) as opened:
        yield opened


@pytest.fixture(scope="module")
def clean():
    return clean_events(write_back="on_pressure")


@pytest.fixture(scope="module")
def log(tmp_path_factory, clean):
    return write_log(tmp_path_factory.mktemp("html") / "run", *clean)


@pytest.fixture(scope="module")
def page(log):
    out = log.parent / "run.html"
    page_of([log], out)
    return out


@pytest.fixture
def opened(driver, page):
    show(driver, page)
    return driver


def chain_by_verb(log, what, ident, seq):
    result = call("why", log, WHATS[what], ident, "--at", seq, "--json")
    if result.exit_code:
        return []
    links = json.loads(result.stdout)["chain"]
    return [[link["event"]["seq"], link["depth"], link["text"]] for link in links]


def faults(driver):
    """What the console says went wrong."""
    return [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def chain_shown(driver):
    return [
        [
            int(li.get_attribute("data-seq")),
            int(li.get_attribute("data-depth")),
            li.find_element("tag name", "p").text.removeprefix("because "),
        ]
        for li in driver.find_elements("css selector", "#links li")
    ]


def test_it_loads_says_what_it_shows_and_asks_nobody(opened, clean, tmp_path):
    about = opened.find_element("id", "about").text
    assert "run" in about and f"{len(clean[1]):,} events" in about and "nothing lost" in about
    assert faults(opened) == []
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0
    shot = tmp_path / "page.png"
    assert opened.save_screenshot(str(shot)) and shot.read_bytes().startswith(b"\x89PNG")
    colours = run(
        opened,
        "const { width, height } = hisparse.canvas;"
        "const { data } = hisparse.ctx.getImageData(0, 0, width, height);"
        "return new Set(new Uint32Array(data.buffer)).size;",
    )
    assert colours > 50


@pytest.mark.parametrize("what", WHATS)
def test_a_click_on_a_change_shows_the_chain_of_why(opened, log, what):
    from selenium.webdriver import ActionChains

    # In the middle of the log, a change that has its lane and its pixel to itself.
    place = run(
        opened,
        """
        const [what] = given, app = hisparse, log = app.logs[0];
        const panel = app.panels.find((p) => p.kind === "lanes" && p.what === what);
        const { lane } = panel;
        const row = what === "transfer" ? 0 : what === "request" ? 2 : 5;
        const end = lane.last ? lane.last[row] : lane.first[row + 1];
        const e = (lane.first[row] + end) >> 1, at = lane.at[e], x = app.logs[0].axes.seq[at];
        app.ranges[what] = { low: Math.max(panel.first, row - 2), high: row + 4 };
        app.setView(x - 30, x + 30);
        app.layout();
        const box = app.canvas.getBoundingClientRect();
        return [box.left + app.xOf(x) + 1, box.top + panel.yOf(row + 0.5), log.seqOf(at)];
        """,
        what,
    )
    settle(opened)
    x, y, seq = place
    actions = ActionChains(opened)
    actions.w3c_actions.pointer_action.move_to_location(round(x), round(y)).click()
    actions.perform()
    settle(opened)
    run(
        opened, "while (!document.getElementById('links')) await new Promise(requestAnimationFrame)"
    )
    ident, at = run(
        opened,
        "const { log, what, id, at } = hisparse.chosen;"
        "return [what === 'transfer' ? log.columns['copy.id'][id] : what === 'request'"
        " ? log.requests[id].name : id, log.seqOf(at)]",
    )
    assert at == seq
    shown = chain_shown(opened)
    assert shown and shown == chain_by_verb(log, what, ident, seq)
    assert f"seq {seq}" in opened.find_element("id", "event").text


def test_every_chain_is_that_of_the_verb(opened, log, clean):
    rng, last = random.Random(0), len(clean[1])
    requests = [e.request for e in clean[1] if isinstance(e, ev.RequestArrived)]
    copies = [t for e in clean[1] if isinstance(e, ev.TransferPinned) for t in e.transfers]
    ids = {"block": range(1, 24), "page": range(1, 64), "request": requests, "transfer": copies}
    told = 0
    for what, known in ids.items():
        for _ in range(12):
            ident, seq = rng.choice(known), rng.randint(1, last)
            shown = run(
                opened,
                "const [what, ident, seq] = given, log = hisparse.logs[0], at = log.placeOf(seq);"
                "const id = log.idOf(what, String(ident), at), links = id < 0 ? [] :"
                " await why(log, what, id, at);"
                "return links.map((link) => [link.seq, link.depth, link.text])",
                what,
                ident,
                seq,
            )
            assert shown == chain_by_verb(log, what, ident, seq), (what, ident, seq)
            told += bool(shown)
    assert told > 24


def test_the_state_at_the_cursor_is_that_of_replay(opened, log, clean):
    history = open_history(log)
    for seq in (1, 40, len(clean[1]) // 2, len(clean[1])):
        state = history.log.state_at(seq)
        shown = run(
            opened,
            "const [seq] = given, log = hisparse.logs[0], at = log.placeOf(seq);"
            "const facts = (what, n) => Array.from({ length: n }, (_, i) =>"
            " [log.stateAt(what, i + 1, at), log.epochAt(what, i + 1, at)]);"
            "const { block, page } = log.lanes;"
            "return [facts('block', block.count - 1), facts('page', page.count - 1),"
            " [...log.countsAt('block', at)], [...log.countsAt('page', at)], log.inFlightAt(at)]",
            seq,
        )
        for found, counts, pool in zip(
            shown[:2], shown[2:4], (state.blocks, state.pages), strict=True
        ):
            assert found == [
                [int(a), int(b)] for a, b in zip(pool.state[1:], pool.epoch[1:], strict=True)
            ]
            assert counts[:8] == [int((pool.state[1:] == code).sum()) for code in range(8)]
        assert shown[4] == len(state.transfers)


def test_behind_a_gap_states_are_unknown_up_to_the_next_snapshot(driver, tmp_path):
    log = make_logs(tmp_path)["gap and snapshot"]
    page_of([log], tmp_path / "page.html")
    show(driver, tmp_path / "page.html")
    state, (lost,) = open_history(log).state_at("last"), open_history(log).gaps
    shown = run(
        driver,
        """
        const [seqs] = given, log = hisparse.logs[0], ids = log.lanes.block.count - 1;
        return seqs.map((seq) => Array.from({ length: ids }, (_, i) =>
          log.stateAt("block", i + 1, log.placeOf(seq))));
        """,
        [lost.first_seq - 1, lost.last_seq, GAP_TO + 29, state.seq],
    )
    before, gap, still, last = shown
    assert set(gap) == set(still) == {15} and 15 not in before
    assert last == state.blocks.state[1:].tolist()
    run(driver, "await hisparse.find(`seq ${given[0]}`)", GAP_TO + 5)
    settle(driver)
    assert "not known here: the writer dropped" in driver.find_element("id", "cursor").text


def test_a_pixel_has_the_colour_of_the_state_there(opened, log, clean):
    history, rng = open_history(log), random.Random(1)
    for what in ("block", "page"):
        for _ in range(8):
            seq, ident = rng.randint(20, len(clean[1]) - 20), rng.randint(3, 20)
            shown, hue = run(
                opened,
                """
                const [what, id, seq, name] = given, app = hisparse;
                app.ranges[what] = { low: id - 2, high: id + 3 };
                app.setView(seq - 10, seq + 10);
                do await new Promise(requestAnimationFrame); while (!app.settled || app.pending);
                const panel = app.panels.find((p) => p.kind === "lanes" && p.what === what);
                const x = app.xOf(seq + 0.5) * app.ratio, y = panel.yOf(id + 0.5) * app.ratio;
                app.cursor = -100; app.chosen = null; app.draw();
                const [r, g, b] = app.ctx.getImageData(x, y, 1, 1).data;
                return [[r, g, b], rgb(app.hues[name])];
                """,
                what,
                ident,
                seq,
                facts(history.log.state_at(seq), target(what, str(ident)))["state"],
            )
            assert shown == hue, (what, ident, seq)


def test_zoomed_out_a_pixel_is_the_mean_over_its_time(opened, log, clean):
    block, last = 7, len(clean[1])
    shown = run(
        opened,
        """
        const [block] = given, { logs, hues } = hisparse, lane = logs[0].lanes.block;
        const axis = logs[0].axes.seq, image = new ImageData(10, 1);
        const place = { x0: axis[0], x1: axis[logs[0].events], low: block, high: block + 1 };
        const palette = paletteOf(hues, lane.names);
        for (const _ of paintLanes({ lane, axis, ...place, image, width: 10, height: 1, palette }));
        return [[...image.data], lane.names.map((name) => rgb(hues[name]))];
        """,
        block,
    )
    pixels, hues = shown
    state, seen = State(clean[0]), []
    for seq, event in enumerate(clean[1], 1):
        evolve(state, event, seq)
        seen.append(hues[int(state.blocks.state[block])])
    for column in range(10):
        low, high = column * last / 10, (column + 1) * last / 10
        shares = [max(0.0, min(i + 1, high) - max(i, low)) for i in range(last)]
        for channel in range(3):
            mean = sum(s * hue[channel] for s, hue in zip(shares, seen, strict=True)) / (high - low)
            assert abs(pixels[4 * column + channel] - mean) <= 6, (column, channel)


def test_search_finds_ids_and_says_so_when_there_is_none(opened, clean):
    from selenium.webdriver import Keys

    def search(text):
        box = opened.find_element("id", "query")
        box.clear()
        box.send_keys(text, Keys.ENTER)
        settle(opened)
        return "unknown" not in (box.get_attribute("class") or "")

    name = next(e.request for e in clean[1] if isinstance(e, ev.RequestArrived))
    assert search("block 5") and "block 5" in opened.find_element("id", "chosen").text
    assert search(f"request {name}") and name in opened.find_element("id", "chosen").text
    assert search("transfer 3") and "transfer 3" in opened.find_element("id", "chosen").text
    assert search("page=2 @ 90") and "host page 2" in opened.find_element("id", "chosen").text
    assert search("seq 123") and "seq 123" in opened.find_element("id", "cursor").text
    for nonsense in ("block 99999", "transfer x", "request nobody", "seven", "step 100000"):
        assert not search(nonsense), nonsense


def test_keys_walk_along_the_changes_and_the_axis_turns(opened):
    from selenium.webdriver import Keys

    run(opened, "await hisparse.find('block 5 @ 200')")
    plot = opened.find_element("id", "plot")
    at = "return hisparse.chosen.at"
    before = opened.execute_script(at)
    plot.send_keys(Keys.ARROW_LEFT)
    settle(opened)
    assert opened.execute_script(at) < before
    plot.send_keys(Keys.ARROW_RIGHT)
    settle(opened)
    assert opened.execute_script(at) == before
    plot.send_keys("s")
    settle(opened)
    assert opened.execute_script("return [hisparse.axis, hisparse.placeIn(hisparse.logs[0])]") == [
        "step",
        before,
    ]


def test_two_logs_lie_over_each_other_and_the_first_difference_is_marked(driver, log, tmp_path):
    other = write_log(tmp_path / "other", *clean_events(write_back="eager"))
    report = page_of([log, other], tmp_path / "two.html")
    assert 5 < report.divergence < 100
    show(driver, tmp_path / "two.html")
    assert f"the logs part at seq {report.divergence}" in driver.find_element("id", "about").text
    assert driver.execute_script("return hisparse.panels.length") == 12
    driver.find_element("css selector", "[data-mode=diff]").click()
    settle(driver)
    same, differ = run(
        driver,
        """
        const [seq] = given, app = hisparse, mark = rgb(app.hues.differ).join(), found = [0, 0];
        const panel = app.panels.find((p) => p.kind === "lanes" && p.what === "block");
        const { canvas, at } = panel.painted, { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
        const edge = ((seq - 1 - at.x0) / (at.x1 - at.x0)) * width;
        for (let i = 0; i < data.length; i += 4)
          if ([...data.slice(i, i + 3)].join() === mark) found[(i / 4) % width < edge ? 0 : 1]++;
        return found;
        """,
        report.divergence,
    )
    assert same == 0 and differ > 100


def test_a_damaged_log_is_hatched_from_the_damage_on(driver, clean, tmp_path):
    damaged = write_log(tmp_path / "log", *clean)
    segment = damaged / "scheduler" / "00000001.seg"
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    events = page_of([damaged], tmp_path / "page.html").records[0].events
    show(driver, tmp_path / "page.html")
    assert "damage in 00000001.seg" in driver.find_element("css selector", "#about .badge").text
    (hole,) = run(driver, "return hisparse.logs[0].holes('seq')")
    assert hole["x0"] == events + 1 < hole["x1"] and "damage" in hole["text"]
    inside = "const x = hisparse.xOf((given[0] + given[1]) / 2), p = hisparse.panels[0];"
    colours = run(
        driver,
        inside + "const d = hisparse.ctx.getImageData(x - 10, p.y, 20, 30).data, s = new Set();"
        "for (let i = 0; i < d.length; i += 4) s.add(d.slice(i, i + 3).join()); return s.size",
        hole["x0"],
        hole["x1"],
    )
    assert colours > 2  # lines, not a plain field


def test_a_hostile_request_id_is_text(driver, tmp_path):
    config, events = clean_events()
    arrived = next(e for e in events if isinstance(e, ev.RequestArrived))
    rest = [getattr(arrived, name) for name in arrived.__struct_fields__[2:]]
    events = [ev.RequestArrived(0, HOSTILE, *rest), *events[1:3]]
    page_of([write_log(tmp_path / "log", config, events)], tmp_path / "page.html")
    show(driver, tmp_path / "page.html")
    run(driver, "await hisparse.choose(hisparse.logs[0], 'request', 0, 0)")
    settle(driver)
    assert HOSTILE in driver.find_element("id", "chosen").text
    assert HOSTILE in driver.find_element("id", "links").text
    assert driver.find_elements("tag name", "img") == [] and "hisparse" in driver.title
    assert faults(driver) == []
