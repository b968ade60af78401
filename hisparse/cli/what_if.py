"""`hisparse what-if`: the inputs of a recorded run, decided again under a change. No torch, no GPU.

Reads the stream ``scheduler``. Options that take a size take several (``a,b`` or ``from:to:step``):
every combination is one variant, beside the recorded figures and their replay.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from hisparse.cli.errors import VIOLATION, said_as, say, spoken
from hisparse.cli.losses import dropped, lost, told, worst
from hisparse.cli.opening import DIRECTORY, History, open_history
from hisparse.cli.output import Progress, emit, emit_json
from hisparse.cli.what_if_text import as_text
from hisparse.config import HiSparseConfig, PolicyConfig
from hisparse.config_check import config_error
from hisparse.engine.selections import STREAM as SELECTIONS
from hisparse.engine.selections import read_selections
from hisparse.engine.what_if.changes import changed_config, drop, swap
from hisparse.engine.what_if.recording import Recording
from hisparse.engine.what_if.study import Study, Variant
from hisparse.errors import ConfigError, LogError, UsageError
from hisparse.fsm.codec import UnknownEvent
from hisparse.fsm.events import Event, LogGap
from hisparse.kv.policies import names, resolve

VARIANTS_MAX = 500
SIZES: dict[str, tuple[str, type]] = {  # option: path in the configuration, type
    "host_pool_gib": ("pools.host_pool_gib", float),
    "gpu_blocks": ("pools.gpu_blocks", int),
    "watermark_blocks": ("policy.watermark_blocks", int),
    "write_back": ("policy.write_back", str),
    "hot_rows": ("policy.hot_rows", int),
    "max_requests": ("schedule.max_requests", int),
    "step_rows": ("schedule.step_rows", int),
    "prefill_chunk": ("schedule.prefill_chunk", int),
}
PATHS = {path: f"--{name.replace('_', '-')}" for name, (path, _) in SIZES.items()}


def _size(flag: str, text: str, metavar: str = "N[,N…]") -> Callable[[Any], Any]:
    return click.option(flag, multiple=True, help=text, metavar=metavar)


@click.command("what-if")
@DIRECTORY
@click.option("--drop", "drops", type=int, multiple=True, metavar="SEQ", help="Without this input.")
@click.option(
    "--swap", "swaps", type=int, nargs=2, multiple=True, metavar="SEQ SEQ",
    help="With these two inputs in each other's place.",
)  # fmt: skip
@click.option(
    "--policy", "policies", multiple=True, metavar="FILE|NAME",
    help="A JSON or TOML file with fields of the config's `policy`, a name, or module:Class.",
)  # fmt: skip
@_size("--host-pool-gib", "Host tier, GiB.", "G[,G…]")
@_size("--gpu-blocks", "Blocks of the packed GPU pool.")
@_size("--watermark-blocks", "Blocks kept free beyond promises.")
@_size("--write-back", "eager, on_pressure.", "WHEN[,WHEN]")
@_size("--hot-rows", "Rows of a request's hot region; needs recorded selections.")
@_size("--max-requests", "Requests that hold a row at once.")
@_size("--step-rows", "Most rows in a step.")
@_size("--prefill-chunk", "Most prompt rows of a request in a step.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def what_if(
    directory: Path,
    drops: Sequence[int],
    swaps: Sequence[tuple[int, int]],
    policies: Sequence[str],
    as_json: bool,
    **sizes: Sequence[str],
) -> int:
    """Decide the run in DIRECTORY again with something changed, and show its figures beside the
    recorded ones: refusals, preemptions, prefix hits, page copies, peaks, and invariants.

    What is replayed are arrivals, the tokens that each request generated, what clients did, and
    how many steps the ranks took to copy; all else is decided anew. A size may be a list (a,b,c)
    or a range (from:to:step); each combination is a variant. With nothing changed, the replay
    equals the log.

    Exits 1 if a variant violates an invariant, 3 if the log ends in a torn tail, 1 where damage or
    lacking events hide a part of it: then what lies before that is replayed.

    Example: hisparse what-if runs/one --host-pool-gib 0.05,0.1,0.2 --gpu-blocks 100:300:50
    """
    given = {name: _values(name, texts) for name, texts in sizes.items() if texts}
    history = open_history(directory)
    own = history.config.policy.name
    if ":" in own and own not in policies:  # a log does not say which code runs here
        raise UsageError(
            f"the log names policy {own}, which is code of its own: say --policy {own} too, to "
            "have it imported"
        )
    selections = read_selections(directory)
    if "hot_rows" in given and selections is None:
        raise UsageError(
            f"--hot-rows needs what attention selected, and {directory} does not hold it: record a "
            "run with hisparse run --record-selections"
        )
    with said_as(PATHS):
        combinations = list(_combinations(history.config, policies, given))
    if len(combinations) > VARIANTS_MAX:
        raise UsageError(f"{len(combinations)} variants: ask for at most {VARIANTS_MAX} at once")
    study = Study(history.config, lambda: _upto_gap(history), selections)
    recording = _changed_inputs(history, study.recording, drops, swaps)
    inputs = [*(f"drop {seq}" for seq in drops), *(f"swap {a} {b}" for a, b in swaps)]
    progress = Progress()
    try:
        report = study.run(
            [
                Variant(
                    ", ".join([*inputs, *words]), config, recording,
                    changes | {"inputs": inputs} if inputs else changes,
                )
                for words, changes, config in combinations
                if words or inputs
            ],
            lambda done: progress("what-if", done, len(combinations)),
        )  # fmt: skip
    finally:
        progress.close()
    if as_json:
        emit_json(report | {"lost": lost(history.loss), "gaps": dropped(history.gaps)})
    else:
        emit(as_text(report))
    broken = _talk(report)
    lacking = told(selections.loss, of=SELECTIONS) if selections is not None else 0
    return worst(broken, lacking, history.told("last", crossed=study.read_seq))


def _upto_gap(history: History) -> Iterator[tuple[int, Event]]:
    """The log's events. Behind a gap nothing is known any more."""
    for seq, event in history:
        if isinstance(event, UnknownEvent):
            raise LogError(f"event {seq} has kind {event.kind}, which this version lacks")
        if isinstance(event, LogGap):
            return
        yield seq, event


def _changed_inputs(
    history: History,
    recording: Recording,
    drops: Sequence[int],
    swaps: Sequence[tuple[int, int]],
) -> Recording:
    for seq in drops:
        recording = drop(recording, seq, _event(history, seq))
    for a, b in swaps:
        recording = swap(recording, (a, _event(history, a)), (b, _event(history, b)))
    return recording


def _event(history: History, seq: int) -> Event:
    history.log.check_seq(seq)
    return next(history.known(seq))[1]


def _talk(report: dict[str, Any]) -> int:
    """What a reader of the figures should know, on stderr; returns the exit code."""
    code = 0
    difference = report["baseline"]["first_difference"]
    if difference is not None:
        lines = [
            (difference[name] or {"line": "(nothing)"})["line"] for name in ("recorded", "decided")
        ]
        figures = ", ".join(report["baseline"]["figures_differ"]) or "none"
        say(
            f"baseline differs: the replay of the log leaves it at seq {difference['seq']} "
            f"(recorded: {lines[0]}; decided: {lines[1]}): compare variants with `replayed`; "
            f"figures of it that differ: {figures}"
        )
    for text in report["assumed"]:
        say(f"assumed: {text}")
    for variant in report["variants"]:
        if variant.get("refused_at_start"):
            why = spoken(variant["refused_at_start"], PATHS)
            say(f"{variant['name']}: an engine would not start: {why}")
        for violation in variant["violations"][:3]:
            say(
                f"{variant['name']}: violated: {violation['invariant']} at seq "
                f"{violation['seq']}: {violation['message']}"
            )
            code = VIOLATION
    return code


# -- what to try ----------------------------------------------------------------------------------

Choice = tuple[str, dict[str, Any]]  # its words, and fields by path


def _combinations(
    config: HiSparseConfig, policies: Sequence[str], given: dict[str, list[Any]]
) -> Iterator[tuple[list[str], dict[str, Any], HiSparseConfig]]:
    """(words, changes, configuration) of each combination."""
    axes: list[list[Choice]] = []
    if policies:
        axes.append([(f"policy {name}", _policy(name)) for name in policies])
    for option, values in given.items():
        path, _ = SIZES[option]
        axes.append([(f"{option.replace('_', '-')} {value}", {path: value}) for value in values])
    for chosen in itertools.product(*axes):
        changes: dict[str, Any] = {}
        for _, fields in chosen:
            changes |= fields
        yield [words for words, _ in chosen], changes, changed_config(config, changes)


def _policy(given: str) -> dict[str, Any]:
    """Fields by path of a policy file, of a policy's name or of its class. Raises ConfigError."""
    path = Path(given)
    if given in names() or (":" in given and not path.exists()):
        resolve(given)
        return {"policy.name": given}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise ConfigError(
            f"--policy {given}: {why}; give a JSON or TOML file, module:Class, or one of "
            f"{', '.join(names())}"
        ) from None
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"--policy {given}: {error}; give JSON, or TOML in a .toml file"
        ) from None
    if isinstance(data, dict) and isinstance(data.get("policy"), dict):
        data = data["policy"]
    if not isinstance(data, dict) or not data:
        known = ", ".join(PolicyConfig.model_fields)
        raise ConfigError(f"--policy {given}: holds no policy; give fields of it: {known}")
    try:
        PolicyConfig.model_validate(data)
    except ValidationError as error:
        unknown = {str(fault["loc"][0]) for fault in error.errors() if fault["loc"]}
        if unknown:  # a fault of one field; faults between fields are judged with the recorded ones
            raise ConfigError(f"--policy {given}: {config_error(error, PolicyConfig)}") from None
    return {f"policy.{name}": value for name, value in data.items()}


def _values(option: str, texts: Sequence[str]) -> list[Any]:
    """The values of one option: lists and ranges, each once, in order. Raises UsageError."""
    _, kind = SIZES[option]
    flag = f"--{option.replace('_', '-')}"
    found: dict[Any, None] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        try:
            values = _range(part) if ":" in part and kind is not str else [kind(part)]
            found |= dict.fromkeys(kind(value) for value in values)
        except (ValueError, InvalidOperation):
            name = {"int": "an integer", "float": "a number"}.get(kind.__name__, "a word")
            raise UsageError(f"{flag} {part!r}: give {name}, a list a,b, or from:to:step") from None
    return list(found)


def _range(text: str) -> list[Decimal]:
    first, last, step = (Decimal(number) for number in text.split(":"))
    if not (step > 0 and first <= last and (last - first) / step < VARIANTS_MAX):
        raise ValueError(text)
    return [first + i * step for i in range(int((last - first) / step) + 1)]
