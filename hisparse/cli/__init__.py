"""The command line: thin, one module a verb. Data on stdout, talk on stderr.

Owns      argument syntax and exit codes: 0 fine, 1 a violation or loss was found, 2 the call or its
          input cannot be used, 3 recovered with loss. No verb ends in a traceback for bad input.
          Long data is paged, on a terminal only.
Needs     click. Torch is imported inside `run`, so that log verbs work on a machine without it.
"""

from __future__ import annotations

import click

from hisparse import __version__
from hisparse.cli.bench import bench
from hisparse.cli.check import check
from hisparse.cli.completion import completion
from hisparse.cli.config import config
from hisparse.cli.diff import diff
from hisparse.cli.errors import OneLineGroup
from hisparse.cli.explore import explore
from hisparse.cli.export import export
from hisparse.cli.fuzz import fuzz
from hisparse.cli.log import log
from hisparse.cli.replay import replay
from hisparse.cli.run import run
from hisparse.cli.shrink import shrink
from hisparse.cli.trace import trace
from hisparse.cli.what_if import what_if
from hisparse.cli.why import why


@click.group(cls=OneLineGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hisparse")
@click.option("--no-pager", is_flag=True, help="Never page long output; as with NO_PAGER set.")
def cli(no_pager: bool) -> None:
    """HiSparse local KV offload, as an event-sourced state machine.

    Example: hisparse run --requests 8
    """


for command in (
    *(run, log, replay, check, why, diff, what_if, trace, bench, export, shrink),
    *(fuzz, explore, config, completion),
):
    cli.add_command(command)


def main() -> None:
    """The console script `hisparse`."""
    cli(prog_name="hisparse")
