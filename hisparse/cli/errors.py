"""Errors at the edge of the command line: one line on stderr, and an exit code that says what kind.

exit    what went wrong
1       a rule of the library was broken: an invariant, an illegal transition, a stale epoch; or
        damage in a log hides what was asked for
2       the call, its files or its sizes cannot be used; the message says what would do
130     interrupted
141     whoever read stdout closed it (`| head`)
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
from pydantic import ValidationError

from hisparse.config_check import config_error
from hisparse.errors import (
    ConfigError,
    HiSparseError,
    IllegalTransition,
    InvariantViolation,
    LogDamage,
    ProtocolError,
    StaleEpoch,
    UsageError,
)

VIOLATION, USAGE, LOSS = 1, 2, 3
READER_GONE = 141  # as a shell has it for SIGPIPE
# A field as messages name it: by its path anywhere, by its bare name before a value.
_FIELD = re.compile(r"(?<![\w./'\"-])([a-z_]\w*+(?:\.[a-z_]\w*+)*+)(=?)((?<==)True\b)?")
_FOUND = (IllegalTransition, InvariantViolation, LogDamage, ProtocolError, StaleEpoch)


def say(message: str) -> None:
    """One line of talk, on stderr."""
    click.echo(f"hisparse: {' '.join(message.split())}", err=True)


def spoken(text: str, names: Mapping[str, str]) -> str:
    """`text` with fields as the caller said them: `names` holds an option by a field's name or
    path, or another path."""

    def said(found: re.Match[str]) -> str:
        field, equals, true = found[1], found[2], found[3] or ""
        name = names.get(field)
        if name is None or not (equals or "." in field):
            return found[0]
        return name if true and name.startswith("--") else f"{name}{equals}{true}"

    parts = text.split("; ")  # a fault each; keys of a file that are none are told as keys
    return "; ".join(one if ": no such key: " in one else _FIELD.sub(said, one) for one in parts)


@contextmanager
def said_as(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals of the block name fields as `spoken` does."""
    try:
        yield
    except ValidationError as error:
        found = config_error(error)
        raise ConfigError(spoken(str(found), names), found.fixes) from None
    except (ConfigError, UsageError) as error:
        error.args = (spoken(str(error), names),)
        raise


def options_of(command: click.Command) -> dict[str, str]:
    """The options of a verb by the names of their parameters."""
    options = (param for param in command.params if isinstance(param, click.Option))
    return {str(option.name): max(option.opts, key=len) for option in options}


class Verb(click.Command):
    """A verb whose refusals name its options, where the library names parameters like them."""

    def invoke(self, ctx: click.Context) -> Any:
        with said_as(options_of(self)):
            return super().invoke(ctx)


class VerbGroup(click.Group):
    """A group of such verbs."""

    command_class = Verb


class OneLineGroup(click.Group):
    """A group whose errors are one line each. A verb returns its exit code, or None for 0."""

    def main(self, *args: Any, **extra: Any) -> Any:
        extra["standalone_mode"] = False
        sys.exit(self._code(*args, **extra))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # `| head` has seen enough; click would exit with 1
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return READER_GONE

    def _code(self, *args: Any, **extra: Any) -> int:
        try:
            code = super().main(*args, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            return USAGE
        except click.UsageError as error:
            where = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
            say(f"error: {error.format_message()}{where}")
            return USAGE
        except click.ClickException as error:
            say(f"error: {error.format_message()}")
            return USAGE
        except (click.Abort, KeyboardInterrupt):
            say("interrupted")
            return 130
        except ValidationError as error:
            say(f"error: {config_error(error)}")
            return USAGE
        except HiSparseError as error:
            say(f"error: {error}")
            return VIOLATION if isinstance(error, _FOUND) else USAGE
        except MemoryError as error:
            say(f"error: not enough memory ({error}): ask for smaller pools")
            return USAGE
        return code if isinstance(code, int) else 0
