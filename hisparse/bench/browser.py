"""A headless Chromium that a test or a measurement looks at an exported page with. Needs selenium.

On Debian: `apt-get install chromium chromium-driver`. Nothing is downloaded: selenium is given the
browser and the driver that are installed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hisparse.errors import HiSparseError, UsageError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
POLL_S = 0.02


def missing() -> str:
    """What is not installed here, in words; empty if a browser can be opened."""
    found = [name for name in BROWSERS if shutil.which(name)]
    lacks = [] if found else ["chromium"]
    lacks += [] if shutil.which("chromedriver") else ["chromedriver (chromium-driver)"]
    try:
        import selenium  # noqa: F401
    except ImportError:
        lacks.append("selenium (pip install 'hisparse[bench]')")
    return f"not installed: {', '.join(lacks)}" if lacks else ""


@contextmanager
def browser(*, width: int = 1500, height: int = 940) -> Iterator[Any]:
    """A selenium WebDriver of a window of `width` x `height` pixels. Raises UsageError."""
    if lacks := missing():
        raise UsageError(f"no browser: {lacks}")
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    for argument in ("headless=new", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.add_argument(f"--window-size={width},{height}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to sandbox for root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    try:
        driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    except WebDriverException as error:
        raise UsageError(f"no browser: {error.msg}") from error
    try:
        driver.set_script_timeout(120)
        yield driver
    finally:
        driver.quit()


def show(driver: Any, page: Path, place: str = "", *, seconds: float = 120) -> None:
    """Open `page` at `place` (as a search) and wait until it is drawn. Raises HiSparseError."""
    driver.get("about:blank")
    driver.get(f"{page.resolve().as_uri()}{'#' + place if place else ''}")
    wait(driver, "document.body.dataset.ready === 'yes'", seconds=seconds)
    settle(driver)


def settle(driver: Any) -> None:
    """Wait until every lane is as sharp as it will be."""
    wait(driver, "hisparse.settled && !hisparse.pending && !hisparse.stale")


def wait(driver: Any, condition: str, *, seconds: float = 20) -> None:
    """Wait for a condition in the page. Raises HiSparseError with what its console says."""
    end = time.monotonic() + seconds
    while not driver.execute_script(f"return {condition}"):
        if time.monotonic() > end:
            said = "; ".join(entry["message"] for entry in driver.get_log("browser"))
            raise HiSparseError(f"not within {seconds} s: {condition} (console: {said or '-'})")
        time.sleep(POLL_S)


def run(driver: Any, script: str, *arguments: Any) -> Any:
    """The result of an async function body in the page, called with `arguments`."""
    found = driver.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        f"(async (...given) => {{ {script} }})(...arguments).then((value) => done([value]),"
        " (error) => done(`${error} ${error.stack}`));",
        *arguments,
    )
    if not isinstance(found, list):
        raise HiSparseError(f"the page threw: {found}")
    return found[0]
