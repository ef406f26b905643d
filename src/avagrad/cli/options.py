"""Options of Typer commands from a table, and --dry-run."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from avagrad.lab.options import OPTIONS, Option

__all__ = ["DryRun", "with_options"]

Command = Callable[..., None]
DryRun = Annotated[bool, typer.Option("--dry-run", help=OPTIONS["dry_run"].help)]


def with_options(options: Iterable[Option]) -> Callable[[Command], Command]:
    """Return a decorator that adds options to a command; its function gets them as the dict ``given``.

    >>> @with_options([OPTIONS["lr"], OPTIONS["compile"]])
    ... def show(word: str, given: dict[str, Any]) -> None:
    ...     print(word, given)
    >>> list(inspect.signature(show).parameters)
    ['word', 'lr', 'compile']
    >>> show(word="a", lr=0.1, compile=False)
    a {'lr': 0.1, 'compile': False}
    """
    table = {option.name: _parameter(option) for option in options}

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def command(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in table}
            function(**arguments, given=given)

        own = [x for x in inspect.signature(function).parameters.values() if x.name != "given"]
        command.__signature__ = inspect.Signature([*own, *table.values()])  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(option: Option) -> inspect.Parameter:
    kind: Any = {bool: bool, list: list[str] | None}.get(option.kind, option.kind | None)
    described = typer.Option(*option.flags, help=option.help, show_default=option.default is not None)
    default = False if option.kind is bool else option.default
    annotation = Annotated[kind, described]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
