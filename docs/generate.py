"""Write what is generated from the code: docs/machines.md, docs/configuration.md, schemas/*.json.

Run ``python docs/generate.py`` after a change to a machine, an event, a wire struct or the config;
with ``--check`` it writes nothing, names what is stale and exits with 1. It refuses to replace the
events' schema by one under which an old log could not be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from hisparse.config import HiSparseConfig
from hisparse.engine.options import DECIDED, PLACES, WORKLOAD, RunConfig
from hisparse.fsm.diagrams import render
from hisparse.fsm.schemas import SCHEMAS, as_text, events_schema, log_breaks

ROOT = Path(__file__).resolve().parent.parent
EVENTS = ROOT / "schemas" / "events.json"


CONFIGURATION = """\
# Configuration

<!-- Written by docs/generate.py from the models; do not edit. -->

Scheduler and worker agree on one `HiSparseConfig`. Its values come from a file, from the
environment, or are given in code, each over the one before it, and are validated alike:

```python
config = HiSparseConfig.load("hisparse.toml", pools={"gpu_blocks": 400})
```

| source | how |
|---|---|
| file | TOML (`.toml`) or JSON, a table a section |
| environment | `HISPARSE_POOLS__GPU_BLOCKS=400`: two underscores after the section; lists as JSON |
| code | sections as mappings |

Every fault is told at once, with the field, the value, where it is from and what would do; a key
that nobody knows is one, with the nearest that is known. `hisparse config hisparse.toml` shows each
value with where it is from, and the sizes that follow from them; also which of GPU blocks, host
pool and requests bounds the host pages that requests at their longest have at once
(`host_pages_planned`): beyond that the pool only keeps prefixes of requests that ended.

This file is an engine's:

```toml
[pools]
page_size = 64
gpu_blocks = 4000
host_pool_gib = 16.0

[layout]  # 656 B a row and layer, 132 B a row of an indexer
row_bytes = 656
index_row_bytes = 132
index_groups = [[0, 1, 2], [3, 4, 5]]

[policy]
top_k = 2048
hot_rows = 4096

[schedule]
max_model_len = 65536
```

`hisparse run --config FILE` takes files of this form and the same environment, and its options
stand above both. Its faults are told at once, of all sections, but those that only the trace, the
model or the GPU shows. What a run decides itself its file leaves out; a run refuses it, with exit
code 2:

| left out of a run's file | because |
|---|---|
{decided}

Its own options are the section `run`, which an engine passes over. This file is a run's:

```toml
[run]
requests = 8
scale = 0.02

[pools]
host_pool_gib = 0.125

[policy]
hot_rows = 48
watermark_blocks = 2
```
"""


def type_name(annotation: object) -> str:
    """As a user writes the value: names of types, or the words that may stand there."""
    if words := [repr(word) for word in get_args(annotation) if isinstance(word, str)]:
        return ", ".join(words)
    text = getattr(annotation, "__name__", str(annotation)) if not get_args(annotation) else ""
    return text or str(annotation).replace("pathlib.", "")


def is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def rows_of(model: type[BaseModel], names: tuple[str, ...] = ()) -> str:
    """A table of the fields of `model` that are no sections."""
    lines = ["| field | type | default | bounds | what |", "|---|---|---|---|---|"]
    for name, field in model.model_fields.items():
        inner = field.annotation
        if (names and name not in names) or is_section(inner):
            continue
        default = "required" if field.is_required() else f"`{field.default}`"
        signs = {"Gt": ">", "Ge": "≥", "Lt": "<", "Le": "≤"}
        bounds = [
            f"{signs[type(one).__name__]} {getattr(one, type(one).__name__.lower())}"
            for one in field.metadata
            if type(one).__name__ in signs
        ]
        cells = (f"`{name}`", type_name(inner), default, ", ".join(bounds), field.description or "")
        lines.append(f"| {' | '.join(cell.replace(' | ', ' or ') for cell in cells)} |")
    return "\n".join(lines)


def configuration() -> str:
    """docs/configuration.md."""
    decided = "\n".join(f"| `{name}` | {why} |" for name, why in DECIDED.items())
    parts = [CONFIGURATION.replace("{decided}", decided)]
    for name, field in HiSparseConfig.model_fields.items():
        if is_section(field.annotation):
            doc = " ".join((field.annotation.__doc__ or "").split())
            parts.append(f"## `{name}`\n\n{doc}\n\n{rows_of(field.annotation)}\n")
    parts.append(f"## At the top level\n\n{rows_of(HiSparseConfig)}\n")
    options = ", ".join(f"`{path}`" for path in PLACES)
    parts.append(
        "## `run`\n\nOf `hisparse run` alone. Options of the same name stand above it; so do those "
        f"for {options}, whose defaults there are those of a small demonstration.\n\n"
        f"{rows_of(RunConfig, WORKLOAD)}\n"
    )
    return "\n".join(parts)


def generated() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    docs = ROOT / "docs"
    files = {docs / "machines.md": render(), docs / "configuration.md": configuration()}
    files |= {ROOT / "schemas" / name: as_text(make()) for name, make in SCHEMAS.items()}
    return files


def stale() -> list[Path]:
    """Generated files that are missing or differ from the code."""
    return [
        path
        for path, text in generated().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def breaks() -> list[str]:
    """What the checked-in format of the log has that the code no longer reads."""
    if not EVENTS.is_file():
        return []
    return log_breaks(json.loads(EVENTS.read_text(encoding="utf-8")), events_schema())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    check = parser.parse_args().check
    broken = breaks()
    if broken:
        print("\n".join(broken), file=sys.stderr)
        return 1
    found = stale()
    for path in found:
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(generated()[path], encoding="utf-8")
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
