"""Write what is generated from the code: docs/machines.md and schemas/*.json.

Run ``python docs/generate.py`` after a change to a machine, an event, a wire struct or the config;
with ``--check`` it writes nothing, names what is stale and exits with 1. It refuses to replace the
events' schema by one under which an old log could not be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hisparse.fsm.diagrams import render
from hisparse.fsm.schemas import SCHEMAS, as_text, events_schema, log_breaks

ROOT = Path(__file__).resolve().parent.parent
EVENTS = ROOT / "schemas" / "events.json"


def generated() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    files = {ROOT / "docs" / "machines.md": render()}
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
