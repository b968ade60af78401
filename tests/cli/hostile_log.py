"""Hostile logs, those that `spoilt_log` writes, and the verbs that are asked about them.

`ask` gives one to a verb, with a bound on time.

`python tests/cli/hostile_log.py MINUTES BASE OUT` searches: guided by coverage with Atheris where
that is installed, else at random. Memory is bounded by the process's own limit; what a verb answers
with a traceback, too slowly, or by running out of memory goes to OUT, as a log directory.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from click.testing import CliRunner

try:
    import atheris
except ImportError:
    atheris = None
searching = atheris is not None and __name__ == "__main__"
with atheris.instrument_imports(include=["hisparse"]) if searching else nullcontext():
    from spoilt_log import Base, Pick, spoil

    from hisparse.cli import cli
    from hisparse.fsm.shrink import shrink

ADDRESS_SPACE_BYTES = 3 << 30
SECONDS = 20  # of CPU time, that a verb may take at most
SHRINK_BUDGET = 20_000  # events judged; the verb's own is larger, and takes minutes at worst
VERBS = (
    ("check", "D", "--json"),
    ("replay", "D", "--json"),
    ("replay", "D", "--at", "step:3"),
    ("replay", "D", "--at", "100", "--json"),
    ("replay", "D", "--watch", "block=3"),
    ("replay", "D", "--watch", "request=r1"),
    ("why", "D", "block", "3"),
    ("why", "D", "host-page", "2", "--json"),
    ("why", "D", "request", "r0"),
    ("why", "D", "transfer", "1"),
    ("diff", "D@60", "D"),
    ("diff", "D", "BASE"),
    ("shrink", "D"),
    ("export", "D", "--to", "jsonl"),
    ("export", "D", "--to", "perfetto", "-o", "D/../out.pftrace"),
    ("export", "D", "--to", "parquet", "-o", "D/../out.parquet"),
    ("log", "info", "D", "--json"),
    ("log", "info", "D", "--stream", "rank-0"),
    ("log", "cat", "D"),
    ("log", "cat", "D", "--request", "r0", "--step", "2..4", "--json"),
    ("log", "cat", "D", "--wide"),
    ("log", "tail", "D"),
    ("log", "recover", "D"),
    ("log", "recover", "D", "--salvage", "D/../salvaged"),
    ("log", "compact", "D"),
)


# -- asking ---------------------------------------------------------------------------------------


class TooSlow(BaseException):
    """Not an Exception, so that nothing on the way takes it for one of its own."""


def ask(verb: tuple[str, ...], directory: Path, base: Path, *, seconds: float = SECONDS) -> str:
    """What is wrong with the answer of `verb` to the log in `directory`; "" if nothing is."""
    hasty = partial(shrink, budget=SHRINK_BUDGET)
    vars(sys.modules["hisparse.cli.shrink"])["shrunk"] = hasty
    args = [part.replace("BASE", str(base)) for part in verb]
    args = [str(directory) + part[1:] if part[:1] == "D" else part for part in args]

    def late(number: int, frame: Any) -> None:
        raise TooSlow

    old = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        done = CliRunner().invoke(cli, args, prog_name="hisparse")
    except TooSlow:
        return f"took more than {seconds} s of CPU time"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
    if not isinstance(done.exception, SystemExit | None):
        return f"{type(done.exception).__name__}: {str(done.exception)[:200]}"
    if done.exit_code not in (0, 1, 2, 3):
        return f"exit code {done.exit_code}"
    if "not enough memory" in done.stderr:
        return "ran out of memory"
    lines = done.stderr.splitlines()
    strange = [line for line in lines if not line.startswith("hisparse: ")]
    return f"stderr: {strange[0][:200]}" if strange else ""


# -- searching ------------------------------------------------------------------------------------


class Search:
    """Spoils, asks one verb, and keeps the first log of each kind of finding."""

    def __init__(self, base: Path, out: Path) -> None:
        self.base, self.out = Base(base), out
        self.work = (
            Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp") / f"hostile-{out.name}"
        )
        self.found: dict[str, int] = {}
        self.tried, self.until = 0, 0.0

    def try_one(self, pick: Pick) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        directory = self.work / "log"
        verb = VERBS[pick(len(VERBS))]
        spoil(self.base, pick, directory)
        kept = self.work / "kept"
        shutil.copytree(directory, kept)
        began = time.monotonic()
        wrong = ask(verb, directory, self.base.directory)
        self.tried += 1
        if wrong:
            kind = f"{' '.join(verb[:2])} {wrong[:60]}"
            self.found[kind] = self.found.get(kind, 0) + 1
            if self.found[kind] == 1:
                target = self.out / f"found-{len(self.found):03d}"
                shutil.copytree(kept, target)
                (target / "verb.txt").write_text(f"{' '.join(verb)}\n{wrong}\n")
                took = time.monotonic() - began
                print(f"{self.tried}: {target.name}: {' '.join(verb)}: {wrong} ({took:.1f} s)")
        if time.monotonic() > self.until:
            print(f"tried {self.tried}, kinds found {len(self.found)}: {self.found}", flush=True)
            os._exit(0)


def main() -> None:
    minutes, base, out = float(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    faulthandler.enable()
    out.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    search = Search(base, out)
    search.until = time.monotonic() + 60 * minutes
    if atheris is None:
        for seed in itertools.count():
            search.try_one(random.Random(seed).randrange)

    def one(data: bytes) -> None:
        taken = atheris.FuzzedDataProvider(data)
        search.try_one(lambda n: taken.ConsumeIntInRange(0, n - 1) if n > 1 else 0)

    with tempfile.TemporaryDirectory() as seeds:
        for seed in range(64):  # long enough to reach every choice at once
            (Path(seeds) / str(seed)).write_bytes(random.Random(seed).randbytes(300))
        options = ["-max_len=400", "-len_control=0", "-timeout=300", "-rss_limit_mb=0", seeds]
        atheris.Setup([sys.argv[0], *options], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
