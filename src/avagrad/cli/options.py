"""Typer commands whose options come from a table."""

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from avagrad.lab.options import Option

__all__ = ["with_options"]


def with_options(function: Callable[..., Any], options: Iterable[Option]) -> Callable[..., Any]:
    """Return a function that takes these options by name, as typer reads them, and hands them on as one mapping.

    ``function`` takes its own parameters, then ``given``.

    >>> def show(word: str, given: dict[str, Any]) -> None:
    ...     print(word, given)
    >>> from avagrad.lab.options import OPTIONS
    >>> command = with_options(show, [OPTIONS["lr"], OPTIONS["compile"]])
    >>> list(inspect.signature(command).parameters)
    ['word', 'lr', 'compile']
    >>> command(word="a", lr=0.1, compile=False)
    a {'lr': 0.1, 'compile': False}
    """
    options = list(options)
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "given"]

    def command(**arguments: Any) -> Any:
        given = {option.name: arguments.pop(option.name) for option in options}
        return function(**arguments, given=given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + [_parameter(x) for x in options]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameter(option: Option) -> inspect.Parameter:
    kind: Any = {bool: bool, list: list[str] | None}.get(option.kind, option.kind | None)
    described = typer.Option(*option.flags, help=option.help, show_default=False)
    default = False if option.kind is bool else None
    annotation = Annotated[kind, described]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
