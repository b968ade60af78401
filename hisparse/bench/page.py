"""`hisparse bench page`: a log as an HTML page: seconds to write it, to open it, and a frame.

The page is opened in a headless Chromium, without a GPU. `frame` is what the page computes and
draws on a way through the log: in from all of it to 200 events and out again, then along it at
three depths, `FRAMES` frames each. `interval` is the time from one frame of the browser to the next
on that way, 16.7 ms where nothing is late. A click is timed until its chain of causes is shown.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hisparse.bench.browser import browser, missing, run, settle, show
from hisparse.bench.measure import Case, summarise
from hisparse.cli.export import page_of
from hisparse.errors import UsageError

FRAMES = 120
CLICKS = 40
_WAY = """
const [frames] = given, app = window.hisparse, all = [app.start, app.end];
const size = all[1] - all[0], middle = all[0] + size * 0.6;
const views = [];
for (const way of [(t) => t, (t) => 1 - t])
  for (let i = 0; i < frames; i++) {
    const wide = size * (200 / size) ** way(i / frames);
    views.push([middle - wide * 0.6, middle + wide * 0.4]);
  }
for (const share of [0.5, 0.05, 0.002])
  for (let i = 0; i < frames; i++) {
    const wide = size * share, from = all[0] + (size - wide) * (i / frames);
    views.push([from, from + wide]);
  }
const intervals = [];
app.frames.length = 0;
let last = 0;
for (const [x0, x1] of views) {
  app.setView(x0, x1);
  const now = await new Promise(requestAnimationFrame);
  if (last) intervals.push(now - last);
  last = now;
}
return [app.frames.slice(), intervals];
"""
_CLICKS = """
const [clicks] = given, app = window.hisparse, lane = app.logs[0].lanes.block, found = [];
app.fit();
for (let i = 0; i < clicks; i++) {
  const id = 1 + Math.floor(((lane.used - 2) * i) / clicks), e = lane.first[id + 1] - 1;
  if (e < lane.first[id]) continue;
  const began = performance.now();
  await app.choose(app.logs[0], "block", id, lane.at[e - Math.floor((e - lane.first[id]) / 2)]);
  found.push(performance.now() - began);
}
return found;
"""


def bench_page(log: Path, directory: Path, *, runs: int) -> list[Case]:
    """Cases of the page of the log in `log`. Raises UsageError where there is no browser."""
    if lacks := missing():
        raise UsageError(f"no browser: {lacks}")
    page = directory / "page.html"
    began = time.monotonic()
    events = page_of([log], page).records[0].events
    took = time.monotonic() - began
    name = f"{events:,} events"
    loads: list[list[float]] = []
    frames: list[list[float]] = []
    intervals: list[list[float]] = []
    clicks: list[list[float]] = []
    with browser() as driver:
        for _ in range(runs):
            began = time.monotonic()
            show(driver, page)
            loads.append([time.monotonic() - began])
            way: list[Any] = run(driver, _WAY, FRAMES)
            settle(driver)
            frames.append(way[0])
            intervals.append(way[1])
            clicks.append(run(driver, _CLICKS, CLICKS))
    return [
        summarise(f"page written, {name}", [[took]], "s"),
        summarise("page size", [[page.stat().st_size / (1 << 20)]], "MiB"),
        summarise("page opened and drawn", loads, "s"),
        summarise("frame, zoom and pan", frames, "ms"),
        summarise("interval of frames", intervals, "ms"),
        summarise("click to chain", clicks, "ms"),
    ]
