"""Take the picture of the HTML page that the README shows.

    make demo && python docs/picture.py runs/demo docs/page.png

It exports the log, opens the page in a headless Chromium, selects a block that a policy's
choice took from its request, and writes a PNG. Needs what the tests of the page need: see
tests/README.md.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hisparse.bench.browser import browser, run, settle, show
from hisparse.cli.export import page_of

VIEW = (1, 900)  # seqs
SCENE = """
const [from, to] = given, log = hisparse.logs[0], { block } = log.lanes, found = [];
hisparse.setTheme("light");
hisparse.setView(from, to);
const { PagesSpilled, PolicyChosen } = log.kindAt;
for (let id = 1; id < block.used; id++)
  for (let e = block.first[id]; e < block.first[id + 1]; e++) {
    const at = block.at[e], cause = causeOf(log, at), x = log.axes.seq[at];
    const told = log.kind[at] === PagesSpilled && cause >= 0 && log.kind[cause] === PolicyChosen;
    if (!told || x < (from + to) / 2 || x > to) continue;
    found.push([explain(log, "block", id, at).length, id, at]);
  }
if (!found.length) throw new Error(`no policy took a page in ${from}..${to}`);
const [, id, at] = found.sort((a, b) => b[0] - a[0] || a[2] - b[2])[0];
await hisparse.choose(log, "block", id, at);
"""


def main(log: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, browser(width=1500, height=1000) as driver:
        page = Path(folder) / "page.html"
        page_of([log], page)
        show(driver, page)
        run(driver, SCENE, *VIEW)
        settle(driver)
        driver.save_screenshot(str(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
