"""Take the picture of the HTML page that the README shows.

    make demo && python docs/picture.py runs/demo docs/page.png

It exports the log, opens the page in a headless Chromium, selects a change, and writes a PNG. Needs
what the tests of the page need: see tests/README.md.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hisparse.bench.browser import browser, run, settle, show
from hisparse.cli.export import page_of

PLACE = "block 98 @ 887"  # given back by a policy's choice; the demo decides the same every time
VIEW = (1, 1000)  # seqs
SCENE = """
const [place, from, to] = given;
hisparse.setTheme("light");
hisparse.setView(from, to);
if (!(await hisparse.find(place))) throw new Error(`the log has no ${place}`);
"""


def main(log: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, browser(width=1500, height=1000) as driver:
        page = Path(folder) / "page.html"
        page_of([log], page)
        show(driver, page)
        run(driver, SCENE, PLACE, *VIEW)
        settle(driver)
        driver.save_screenshot(str(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
