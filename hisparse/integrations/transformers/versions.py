"""Which transformers this works with, said before anything of it is touched."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from hisparse.errors import UsageError

OLDEST = (5, 17)
EXTRA = "pip install 'hisparse[transformers]' (transformers>=5.17)"


def require() -> tuple[int, int]:
    """The (major, minor) of the transformers installed. Raises UsageError without a usable one."""
    try:
        found = version("transformers")
    except PackageNotFoundError as error:
        raise UsageError(f"transformers is not installed: {EXTRA}") from error
    parts = re.match(r"(\d+)\.(\d+)", found)
    if parts is None or (int(parts[1]), int(parts[2])) < OLDEST:
        raise UsageError(f"transformers {found} is too old: {EXTRA}")
    return int(parts[1]), int(parts[2])
