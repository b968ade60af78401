"""`hisparse fuzz`: the simulator over many seeds, with the whole fault atlas. No torch but with
`--device cuda`.

Exits 1 where a seed fails, or a mark of the atlas was hit by none; 0 otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from hisparse.cli.errors import VIOLATION, Verb, say
from hisparse.cli.mutants import hunt_mutants
from hisparse.cli.output import Progress, emit, emit_json, table
from hisparse.errors import ConfigError

if TYPE_CHECKING:
    from hisparse.testing.campaign import Campaign, Found

SEEDS = "0..500"


@click.command(cls=Verb)
@click.option(
    "--seeds", metavar="A..B", help=f"Seeds from A up to, not with, B.  [default: {SEEDS}]"
)
@click.option("--seed", type=int, metavar="S", help="One seed again.")
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Steps with faults, a seed.")
@click.option("--minutes", type=click.FloatRange(0), metavar="M", help="Stop after so long.")
@click.option("--ranks", type=click.IntRange(1, 3), help="Worker ranks.  [default: 1 to 3, drawn]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Of the ranks.")
@click.option("--faults", default="", metavar="A,B,-C", help="Kinds or families; -C leaves out.")
@click.option("--keep-logs", type=click.Path(path_type=Path), metavar="DIR", help="See above.")
@click.option("--program", type=click.Path(path_type=Path), metavar="FILE", help="Do it again.")
@click.option(
    "--mutants", is_flag=False, flag_value="all", metavar="[A,B|I/N]", help="Find seeded faults."
)
@click.option("--no-shrink", is_flag=True, help="Of --mutants: only find them.")
@click.option("--no-marks", is_flag=True, help="Ask for no marks: for a run that is short.")
@click.option("--list", "listed", is_flag=True, help="Print the fault atlas and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def fuzz(
    seeds: str | None,
    seed: int | None,
    steps: int | None,
    minutes: float | None,
    ranks: int | None,
    device: str,
    faults: str,
    keep_logs: Path | None,
    program: Path | None,
    mutants: str | None,
    no_shrink: bool,
    no_marks: bool,
    listed: bool,
    as_json: bool,
) -> int:
    """Run simulated worlds in which faults strike, and check everything in all of them.

    Each seed draws its world, its operations and its faults; the same seed gives the same run. A
    seed that fails is run again with less and less switched on and done. --keep-logs writes the log
    of that to DIR/seed-S, for replay, check and why, and beside it program.json, for --program
    (with --seed: whatever came out). With --minutes alone, seeds go on for as long. Exits 1 for a
    violation, and for marks of the atlas that no seed hit. --mutants, in a checkout, puts one fault
    after the other into the code (I/N: a part of them), and exits 1 unless each is found. --device
    cuda: the same worlds with real copies on a GPU, where a seed says what is done, and no longer
    how it interleaves; no mark is asked for.

    Example: hisparse fuzz --seed 7 --ranks 2
    """
    from hisparse.testing.atlas import select
    from hisparse.testing.campaign import run_campaign
    from hisparse.testing.swarm import STEPS

    if seed is not None and (seeds is not None or minutes is not None):
        raise ConfigError("--seed is one run: leave out --seeds and --minutes")
    if program is not None and (seed is not None or seeds is not None or minutes is not None):
        raise ConfigError("--program is one run: leave out --seed, --seeds and --minutes")
    if program is not None:
        return play_file(program, keep_logs, as_json, device)
    if mutants is not None:
        if seed is not None or minutes is not None or keep_logs is not None or faults:
            raise ConfigError("--mutants takes --seeds, --ranks and --steps: leave out the others")
        chosen = chosen_seeds(seeds, None, None)[0] if seeds is not None else None
        return hunt_mutants(mutants, chosen, ranks, steps, as_json, shrink=not no_shrink)
    if no_shrink:
        raise ConfigError("--no-shrink goes with --mutants: add it, or leave --no-shrink out")
    if listed:
        emit_json({"faults": atlas_rows()}) if as_json else emit(atlas_text())
        return 0
    wanted, total = chosen_seeds(seeds, seed, minutes)
    bar = Progress()
    how: dict[str, Any] = {"asks_marks": not no_marks}
    if device == "cuda":
        from hisparse.testing.on_gpu import play_on_gpu, simulate_on_gpu

        how = {"run": simulate_on_gpu, "play": play_on_gpu, "asks_marks": False}
    try:
        campaign = run_campaign(
            wanted,
            kinds=select(faults),
            ranks=ranks,
            steps=steps if steps is not None else STEPS,
            minutes=minutes,
            **how,
            progress=lambda c: bar("seeds", len(c.seeds), total),
        )
    finally:
        bar.close()
    if keep_logs is not None:
        keep_all(campaign, keep_logs, passed=seed is not None)
    emit_json(campaign.report()) if as_json else emit(as_text(campaign))
    options = [f"--device {device}"] * (device != "cpu")
    options += [f"--ranks {ranks}"] * bool(ranks) + [f"--steps {steps}"] * bool(steps)
    options += [f"--faults {faults}"] * bool(faults)
    for found in campaign.found:
        tell(found, keep_logs, " ".join([f"hisparse fuzz --seed {found.result.seed}", *options]))
    if campaign.marks_missing and not campaign.found:
        say(f"marks that no seed hit: {', '.join(campaign.marks_missing)}; take more seeds")
    return VIOLATION if campaign.red else 0


def chosen_seeds(
    seeds: str | None, seed: int | None, minutes: float | None
) -> tuple[Iterable[int], int]:
    """The seeds to run, and how many of them a bar should count. Raises ConfigError."""
    if seed is not None:
        return [seed], 1
    if seeds is None and minutes is not None:
        return count(), 0
    first, dots, last = (seeds or SEEDS).partition("..")
    if not (dots and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ConfigError(
            f"seeds={seeds!r} must be A..B, two whole numbers, A below B: use {SEEDS}"
        )
    return range(int(first), int(last)), int(last) - int(first)


def atlas_rows() -> list[dict[str, object]]:
    from hisparse.testing.atlas import ATLAS

    return [
        {"kind": kind, "family": fault.family, "rule": fault.rule, "marks": fault.all_marks()}
        for kind, fault in ATLAS.items()
    ]


def atlas_text() -> list[str]:
    """A kind a line under its family: what must still hold."""
    lines, family = [], ""
    for row in atlas_rows():
        if row["family"] != family:
            family = str(row["family"])
            lines.append(family)
        lines.append(f"  {row['kind']:<22} {row['rule']}")
    return lines


def as_text(campaign: Campaign) -> str:
    report = campaign.report()
    marks = report.pop("sometimes")
    faults = report.pop("faults")
    missing, violations = report.pop("marks_missing"), report.pop("violations")
    report |= {"violations": len(violations), "marks_missing": len(missing)}
    groups = {"campaign": report, "faults fired": faults, "survived": marks}
    return table(groups)


def keep_all(campaign: Campaign, directory: Path, *, passed: bool) -> None:
    """Write the logs of what failed; `passed`: where nothing did, that of the last seed."""
    from hisparse.testing.logs import keep

    only = [campaign.last] if passed else []
    for result in [found.result for found in campaign.found] or only:
        assert result is not None
        keep(result, directory / f"seed-{result.seed}")


def tell(found: Found, kept: Path | None, command: str) -> None:
    """What failed, the least that shows it, and how to see it again."""
    violation, seed = found.result.violation, found.result.seed
    assert violation is not None
    for text in found.told():
        say(f"seed {seed}: {text}")
    say(f"again: {command}")
    where = (kept or Path("runs/fuzz")) / f"seed-{seed}"
    if kept is None:
        say(f"its log: {command} --keep-logs {where.parent}")
    say(f"replay: hisparse replay {where} --at {max(violation.seq - 1, 0)}")


def play_file(path: Path, keep_logs: Path | None, as_json: bool, device: str) -> int:
    """Do a program again, and say what came of it."""
    from hisparse.testing.logs import keep
    from hisparse.testing.program import from_json
    from hisparse.testing.simulator import play

    try:
        program = from_json(path.read_bytes(), str(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--program {path}: {reason}; give a file of --keep-logs") from None
    if device == "cuda":
        from hisparse.testing.on_gpu import play_on_gpu

        result = play_on_gpu(program)
    else:
        result = play(program)
    if keep_logs is not None:
        keep(result, keep_logs)
    violation = result.violation
    report = {
        "steps": result.steps,
        "events": result.events,
        "rows_checked": result.rows_checked,
        "faults": dict(result.fired),
        "sometimes": dict(result.sometimes),
        "violations": [] if violation is None else [msgspec.structs.asdict(violation)],
        "program": program.lines(),
        "state_digest": result.digest,
    }
    if as_json:
        emit_json(report)
    else:
        emit("\n".join(program.lines()))
    if violation is None:
        say(f"nothing is violated, in {result.steps} steps and {result.events} events")
        return 0
    say(f"{violation.invariant} at seq {violation.seq}: {violation.message}")
    return VIOLATION
