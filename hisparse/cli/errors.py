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
import sys
from typing import Any

import click
from pydantic import ValidationError

from hisparse.config_check import config_error
from hisparse.errors import (
    HiSparseError,
    IllegalTransition,
    InvariantViolation,
    LogDamage,
    ProtocolError,
    StaleEpoch,
)

VIOLATION, USAGE, LOSS = 1, 2, 3
READER_GONE = 141  # as a shell has it for SIGPIPE
_FOUND = (IllegalTransition, InvariantViolation, LogDamage, ProtocolError, StaleEpoch)


def say(message: str) -> None:
    """One line of talk, on stderr."""
    click.echo(f"hisparse: {' '.join(message.split())}", err=True)


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
