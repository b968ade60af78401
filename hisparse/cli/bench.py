"""`hisparse bench`: measured figures, in one run, as medians with their spread and ratios."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hisparse.bench.measure import Case, as_json, as_table
from hisparse.cli.errors import VerbGroup, said_as, say
from hisparse.config import GIB

if TYPE_CHECKING:
    from hisparse.device.cuda.host_pieces import Progress


# What the code below a benchmark names, by the option that says it.
FIELDS = {
    "pools.gpu_blocks": "--gpu-blocks",
    "policy.top_k": "--top-k",
    "policy.hot_rows": "--hot-rows",
    "layout.row_bytes": "--row-bytes",
    "model_type": "--model",
}


def _report(measure: Callable[[Path], list[Case]], json: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="hisparse-bench-") as directory, said_as(FIELDS):
        cases = measure(Path(directory))
    click.echo(as_json(cases) if json else as_table(cases))


_json = click.option("--json", is_flag=True, help="Print the cases as JSON.")
_runs = click.option("--runs", type=click.IntRange(1), default=5, show_default=True)


@click.group(cls=VerbGroup)
def bench() -> None:
    """Measure a part of hisparse on this machine.

    Example: hisparse bench coordinator --json
    """


@bench.command()
@click.option("--requests", type=click.IntRange(1), default=256, show_default=True)
@click.option("--tokens", type=click.IntRange(64), default=32_768, show_default=True)
@click.option("--gpu-blocks", type=click.IntRange(2), default=200_000, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=256, show_default=True)
@click.option("--tenfold/--no-tenfold", default=True, help="Also ten times the tokens and blocks.")
@_runs
@_json
def coordinator(
    requests: int, tokens: int, gpu_blocks: int, steps: int, tenfold: bool, runs: int, json: bool
) -> None:
    """The scheduler's part of a steady decode step: by log, at ten times the size, and by part.

    Example: hisparse bench coordinator --requests 64
    """
    from hisparse.bench.coordinator import bench_coordinator

    def measure(directory: Path) -> list[Case]:
        return bench_coordinator(
            directory,
            requests=requests,
            tokens=tokens,
            gpu_blocks=gpu_blocks,
            steps=steps,
            runs=runs,
            tenfold=tenfold,
        )

    _report(measure, json)


@bench.command()
@click.option("--requests", type=click.IntRange(2), default=8, show_default=True)
@click.option("--tokens", type=click.IntRange(512), default=4096, show_default=True)
@click.option("--top-k", type=click.IntRange(1), default=256, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=64, show_default=True)
@_runs
@_json
def backend(requests: int, tokens: int, top_k: int, steps: int, runs: int, json: bool) -> None:
    """A decode step through `HiSparseBackend` on `cpu`, by verb; what its resolve allocates.

    Example: hisparse bench backend --requests 2 --tokens 2048
    """
    from hisparse.bench.backend import bench_backend

    shape = {"requests": requests, "tokens": tokens, "top_k": top_k, "steps": steps}
    _report(lambda _: bench_backend(**shape, runs=runs), json)


@bench.command()
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True)
@click.option("--tokens", type=click.IntRange(64), default=32_768, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=512, show_default=True)
@click.option(
    "--checked", type=click.IntRange(100), default=20_000, show_default=True,
    help="Events of each log that is checked.",
)  # fmt: skip
@click.option(
    "--sought", type=click.IntRange(100), default=1_000_000, show_default=True,
    help="Events of the log that is sought in.",
)  # fmt: skip
@_runs
@_json
def log(
    requests: int, tokens: int, steps: int, checked: int, sought: int, runs: int, json: bool
) -> None:
    """Events appended, beside `eventsourcing` and a plain file; folded; checked; sought; a state's
    bytes.

    Without the extra `hisparse[bench]` the cases of `eventsourcing` are left out.

    Example: hisparse bench log --runs 3
    """
    from hisparse.bench.log import bench_log
    from hisparse.bench.log_append import EXTRA, LIBRARY, has_library

    def measure(directory: Path) -> list[Case]:
        return bench_log(
            directory,
            requests=requests,
            tokens=tokens,
            steps=steps,
            checked=checked,
            sought=sought,
            runs=runs,
        )

    _report(measure, json)
    if not has_library():
        say(f"left out: append, {LIBRARY} popo and sqlite: pip install '{EXTRA}' brings {LIBRARY}")


@bench.command()
@click.argument("directory", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--requests",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Without DIRECTORY: serve so many, about 100 events each, for a log.",
)
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True)
@_json
def page(directory: Path | None, requests: int, runs: int, json: bool) -> None:
    """The HTML page of a log, in a headless Chromium: written, opened, moved, clicked.

    Example: hisparse bench page runs/one
    """
    from hisparse.bench.page import bench_page
    from hisparse.bench.serving import serve_to_log

    def measure(place: Path) -> list[Case]:
        log = directory or place / "log"
        if directory is None:
            serve_to_log(requests, log)
        return bench_page(log, place, runs=runs)

    _report(measure, json)


@bench.command()
@click.option("--row-bytes", type=click.IntRange(16), default=656, show_default=True)
@click.option("--hot-rows", type=click.IntRange(2048), default=4096, show_default=True)
@click.option("--slab-gib", type=click.FloatRange(0), default=0, help="Host slab, at least.")
@click.option("--runs", type=click.IntRange(1), default=15, show_default=True)
@_json
def resolver(row_bytes: int, hot_rows: int, slab_gib: float, runs: int, json: bool) -> None:
    """The fused resolve on a GPU, graph-replayed, beside a raw gather of the rows that it misses.

    Example: hisparse bench resolver --row-bytes 1152
    """
    from hisparse.bench.resolver import Shape, bench_resolver

    shape = Shape(row_bytes=row_bytes, hot_rows=hot_rows, slab_gib=slab_gib)
    _report(lambda _: bench_resolver(shape, runs=runs), json)


@bench.command()
@click.option("--gib", type=click.FloatRange(0, min_open=True), default=8, show_default=True)
@_runs
@_json
def host_pool(gib: float, runs: int, json: bool) -> None:
    """Pinning a host pool for a GPU in the background: its time, and launches beside it.

    Example: hisparse bench host-pool --gib 24
    """
    from hisparse.bench.host_pool import bench_host_pool

    tenths = 0

    def tell(progress: Progress) -> None:
        nonlocal tenths
        done, total = progress.registered_bytes, progress.total_bytes
        if 10 * done // total > tenths:
            tenths = 10 * done // total
            took = f"{progress.elapsed_s:.2f} s"
            say(f"pinned {done / GIB:.2f} of {total / GIB:.2f} GiB after {took}")

    _report(lambda _: bench_host_pool(gib, runs=runs, on_progress=tell), json)


@bench.command()
@click.option("--model", default="deepseek_v32", show_default=True, help="Kind of the tiny model.")
@click.option("--lines", type=click.IntRange(1), default=4, show_default=True)
@click.option("--context", type=click.IntRange(64), default=512, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=64, show_default=True)
@_runs
@_json
def generate(model: str, lines: int, context: int, steps: int, runs: int, json: bool) -> None:
    """A decode step of a tiny transformers model over the tiers, and with its own resident cache.

    Example: hisparse bench generate --lines 8
    """
    from hisparse.bench.generate import bench_generate

    _report(
        lambda _: bench_generate(model, lines=lines, context=context, steps=steps, runs=runs), json
    )


@bench.command()
@click.option("--runs", type=click.IntRange(1), default=9, show_default=True)
@_json
def spill(runs: int, json: bool) -> None:
    """Page copies between GPU and host: alone, beside a decode loop, beside resolves that miss.

    Example: hisparse bench spill --json
    """
    from hisparse.bench.spill import bench_spill

    _report(lambda _: bench_spill(runs=runs), json)
