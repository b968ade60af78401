"""`hisparse config`: the configuration that a file, the environment and `--set` make together, and
where each value is from. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from hisparse.cli.output import emit, emit_json
from hisparse.config import host_page_bounds
from hisparse.config_check import REQUIRED
from hisparse.config_sources import load, parsed
from hisparse.device.checks import checksum_sizes
from hisparse.device.cuda.kernels import resolve_memory
from hisparse.device.cuda.state import check_kernel_sizes
from hisparse.errors import ConfigError

DERIVED = ("block_bytes", "page_bytes", "host_pages", "suffix_pages", "hot_blocks", "max_pages")


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.FIELD=VALUE",
    help="One value, over those of file and environment; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print values, origins and sizes as JSON.")
def config(file: Path | None, settings: tuple[str, ...], as_json: bool) -> None:
    """The effective configuration: each value, and where it is from.

    FILE is TOML or JSON; HISPARSE_SECTION__FIELD in the environment stands above it, --set above
    both. Exits 2 with every fault at once; what only a GPU does not take is told, and is none.

    Example: hisparse config hisparse.toml --set pools.gpu_blocks=400
    """
    try:
        loaded, origins = load(file, **_sections(settings))
    except ConfigError as error:
        if REQUIRED not in str(error):
            raise
        raise ConfigError(
            f"{error}; give what is required in FILE, as --set SECTION.FIELD=VALUE or as "
            "HISPARSE_SECTION__FIELD=VALUE in the environment",
            error.fixes,
        ) from None
    values = dict(_values(loaded, ""))
    told = {path: origins.get(path, "default") for path in values}
    told["pools.index_pages_per_block"] = origins.get("pools.index_pages_per_block", "chosen")
    sizes = {name: getattr(loaded, name) for name in DERIVED}
    sizes |= checksum_sizes(loaded)
    refused: dict[str, str] = {}  # by the backends that do not take what `cpu` does
    try:
        check_kernel_sizes(loaded)
        sizes |= resolve_memory(loaded)
    except ConfigError as error:
        refused["cuda"] = str(error)
    bounds = host_page_bounds(loaded)
    planned = min(bounds, key=lambda field: bounds[field]) if bounds else None
    if as_json:
        report = {"config": loaded.model_dump(mode="json"), "origins": told, "sizes": sizes}
        planning = {"host_pages": bounds, "bound_by": planned}
        emit_json(report | {"planned": planning, "refused": refused})
        return
    rows = [(path, str(value), told[path]) for path, value in values.items()]
    rows += [(name, str(value), "computed") for name, value in sizes.items()]
    if planned is not None:
        of = ", ".join(f"{field} {pages}" for field, pages in bounds.items())
        rows.append(("host_pages_planned", str(bounds[planned]), f"bound by {planned} (of {of})"))
    rows += [(backend, "refused", why) for backend, why in refused.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    emit([f"{path:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for path, value, origin in rows])


def _sections(settings: tuple[str, ...]) -> dict[str, Any]:
    """``pools.gpu_blocks=400`` as nested sections. Raises UsageError."""
    found: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            raise click.UsageError(f"--set {setting}: give SECTION.FIELD=VALUE")
        *sections, name = path.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise click.UsageError(f"--set {setting}: {section} is a value already")
        place[name] = parsed(f"--set {path}", text)
    return found


def _values(model: BaseModel, before: str) -> Iterator[tuple[str, object]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _values(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
