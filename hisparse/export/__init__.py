"""Logs in other tools' formats, one module a format. Each reads events and writes one stream.

Owns      the shape of what it writes; nothing on disk but the file that it was given.
Needs     its own library, imported in the function that writes: a verb that does not export to
          parquet runs without pyarrow. `missing` is the error for a library that is not there.
Edges     a log may say anything: numbers beyond a column's type go to the JSON of the rest.
"""

from __future__ import annotations

from hisparse.errors import UsageError


def missing(library: str, extra: str) -> UsageError:
    """The error for a library that only the extra `extra` installs."""
    return UsageError(f"{library} is not installed: pip install 'hisparse[{extra}]'")
