"""`hisparse trace`: request traces in the Mooncake JSONL format."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import click

from hisparse.cli.errors import VerbGroup, said_as, say
from hisparse.cli.output import emit_json
from hisparse.engine.options import RunConfig
from hisparse.engine.trace import write_trace
from hisparse.engine.trace_generate import generate_trace

PARAMETERS = {  # of `generate_trace`, where an option has another name
    "n": "--requests",
    "median_input": "--median-tokens",
    "median_output": "--median-answer",
    "max_input": "--max-tokens",
}


def _default(name: str) -> Any:
    """The default of `generate_trace` itself, so that there is one."""
    return inspect.signature(generate_trace).parameters[name].default


@click.group(cls=VerbGroup)
def trace() -> None:
    """Make request traces.

    Example: hisparse trace generate chat.jsonl --requests 100
    """


@trace.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--requests", type=int, default=100, help="Requests to write.")
@click.option("--seed", type=int, default=RunConfig().seed, help="Equal seeds, equal files.")
@click.option(
    "--requests-per-s",
    type=float,
    default=_default("requests_per_s"),
    help="Mean rate of arrivals.",
)
@click.option(
    "--median-tokens",
    type=int,
    default=_default("median_input"),
    help="Median of the opening message of a conversation.",
)
@click.option(
    "--median-answer",
    type=int,
    default=_default("median_output"),
    help="Median of the tokens generated.",
)
@click.option(
    "--max-tokens",
    type=int,
    default=_default("max_input"),
    help="Longest prompt, with history.",
)
@click.option(
    "--followups",
    type=float,
    default=_default("followups"),
    help="Share of requests that continue a conversation, and so share its prefix.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def generate(
    out: Path,
    requests: int,
    seed: int,
    requests_per_s: float,
    median_tokens: int,
    median_answer: int,
    max_tokens: int,
    followups: float,
    as_json: bool,
) -> None:
    """Write a trace of a chat service to OUT: lengths, arrivals, shared prefixes, by seed.

    Example: hisparse trace generate chat.jsonl --requests 100 --seed 7
    """
    with said_as(PARAMETERS):
        made = generate_trace(
            requests,
            seed,
            requests_per_s=requests_per_s,
            median_input=median_tokens,
            median_output=median_answer,
            max_input=max_tokens,
            followups=followups,
        )
    write_trace(out, made)
    if as_json:
        emit_json({"out": str(out), "requests": len(made)})
    say(f"wrote {len(made)} requests to {out}")
