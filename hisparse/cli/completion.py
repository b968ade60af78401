"""`hisparse completion`: tab completion in a shell; and what completes kinds, ids and places.

Owns      the completers that options and arguments name. The shell's side is click's.
Edges     a completer that cannot read the log offers nothing; it never fails, prints or writes.
          Ids of requests and transfers come from the first `SCANNED` events.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from hisparse.cli.output import emit
from hisparse.errors import HiSparseError
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES, RequestArrived, TransferPinned
from hisparse.fsm.log_history import LogHistory

SHELLS = ("bash", "zsh", "fish")
SCANNED = 200_000
OFFERED = 100
KINDS = sorted(cls.__name__ for cls in EVENT_TYPES)


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that makes SHELL complete verbs, options, directories and ids on TAB.

    bash: add `eval "$(hisparse completion bash)"` to ~/.bashrc. zsh: the same in ~/.zshrc.
    fish: `hisparse completion fish > ~/.config/fish/completions/hisparse.fish`.

    Example: hisparse completion bash
    """
    made = get_completion_class(shell)
    assert made is not None, f"click has no completion for {shell}"
    root = click.get_current_context().find_root().command
    emit(made(root, {}, "hisparse", "_HISPARSE_COMPLETE").source())


def kind_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of events."""
    return _offered(KINDS, incomplete)


def ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of the kind that was named before, of the log that was named before that."""
    found: list[CompletionItem] = []
    directory, kind = ctx.params.get("directory"), ctx.params.get("kind")
    with suppress(HiSparseError, OSError):
        if directory is not None and kind is not None:
            found = _offered(_ids(Path(directory), str(kind)), incomplete)
    return found


def places(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A directory, with an ``@`` behind it where it holds a log."""
    if "@" in incomplete:
        return _offered([f"{incomplete.partition('@')[0]}@{end}" for end in ("last", "step:")], "")
    parent = Path(os.path.expanduser(os.path.dirname(incomplete) or "."))
    lead = incomplete[: len(incomplete) - len(os.path.basename(incomplete))]
    found: list[str] = []
    with suppress(OSError):
        for path in sorted(parent.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                found.append(f"{lead}{path.name}" + ("" if _is_log(path) else "/"))
    return _offered(found, incomplete)


def _is_log(path: Path) -> bool:
    return any((path / "scheduler").glob("*.seg*"))


def _ids(directory: Path, kind: str) -> Iterator[str]:
    history = LogHistory.open(directory)
    if kind in ("block", "host-page"):
        pools = history.config
        most = pools.pools.gpu_blocks if kind == "block" else pools.host_pages
        yield from map(str, range(1, most))
        return
    wanted = RequestArrived if kind == "request" else TransferPinned
    codec, tag = Codec(EVENT_TYPES), wanted.__struct_config__.tag
    for _, got, body in islice(history.frames(history.first_seq), SCANNED):
        if got != tag:
            continue
        event = codec.decode(got, body)
        if isinstance(event, RequestArrived):
            yield event.request
        elif isinstance(event, TransferPinned):
            yield from map(str, event.transfers)


def _offered(values: Iterable[str], incomplete: str) -> list[CompletionItem]:
    fitting = (value for value in dict.fromkeys(values) if value.startswith(incomplete))
    return [CompletionItem(value) for value in islice(fitting, OFFERED)]
