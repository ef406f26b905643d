"""The tasks, one file each; :func:`task_class` finds them by name, and your own by ``module:Class``."""

import importlib

from avagrad.lab.tasks.base import Task
from avagrad.names import imported, look_up

__all__ = ["TASKS", "task_class"]

# name: (module, class, description). The modules are imported lazily: they need different libraries.
TASKS: dict[str, tuple[str, str, str]] = {
    "digits": ("avagrad.lab.tasks.digits", "Digits", "8 x 8 images of handwritten digits, from scikit-learn"),
    "chars": ("avagrad.lab.tasks.chars", "Chars", "character-level language modelling: Penn Treebank, or any text"),
    "gpt": ("avagrad.lab.tasks.gpt", "Gpt", "a transformer: any text as characters, or token files"),
    "cifar": ("avagrad.lab.tasks.cifar", "Cifar", "CIFAR-10 and CIFAR-100, with a Wide ResNet"),
    "imagenet": ("avagrad.lab.tasks.imagenet", "ImageNet", "ImageNet, with a ResNet-50"),
}


def task_class(name: str) -> type[Task]:
    """Return the class of a task, or raise an error that lists all; ``module:Class`` is a task of your own.

    >>> task_class("digits").__name__
    'Digits'
    >>> task_class("digit")
    Traceback (most recent call last):
    ...
    ValueError: task is 'digit', which is not known; did you mean 'digits'? Choose from: digits, chars, ...
    """
    if name == "synthetic":
        raise ValueError("task is 'synthetic', which is not a training run: `avagrad synthetic` runs it.")
    if ":" in name:
        return _own_class(name)
    module, attribute, _ = look_up("task", name, TASKS)
    found: type[Task] = getattr(importlib.import_module(module), attribute)
    return found


def _own_class(name: str) -> type[Task]:
    found = imported("task", "Class", name)
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ValueError(f"task is {name!r}, which is not a subclass of avagrad.lab.tasks.base.Task.")
    return found
