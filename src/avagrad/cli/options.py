"""Options of Typer commands from a table, and --dry-run."""

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from avagrad.lab.options import OPTIONS, Option

__all__ = ["DryRun", "with_options"]

Command = Callable[..., None]
DryRun = Annotated[bool, typer.Option("--dry-run", help=OPTIONS["dry_run"].help)]


def with_options(options: Iterable[Option]) -> Callable[[Command], Command]:
    """Return a decorator that adds options to a command, whose function takes them as ``**given``.

    >>> @with_options([OPTIONS["lr"], OPTIONS["compile"]])
    ... def show(word: str, **given: Any) -> None: ...
    >>> list(inspect.signature(show).parameters)
    ['word', 'lr', 'compile']
    """

    def decorate(command: Command) -> Command:
        *own, _ = inspect.signature(command).parameters.values()
        command.__signature__ = inspect.Signature([*own, *map(_parameter, options)])  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(option: Option) -> inspect.Parameter:
    kind: Any = {bool: bool, list: list[str] | None}.get(option.kind, option.kind | None)
    flags = () if option.default is True else option.flags  # typer adds the flag with --no
    default = bool(option.default) if option.kind is bool else option.default
    annotation = Annotated[kind, typer.Option(*flags, help=option.help)]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
