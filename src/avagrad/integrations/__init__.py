"""Callbacks that log an optimizer's numbers in Hugging Face's Trainer and in Lightning, and names for timm.

>>> from avagrad.integrations import register_with_timm

The frameworks are imported lazily.
"""

import importlib
from typing import Any

__all__ = ["HuggingFaceCallback", "LightningCallback", "register_with_timm"]

_MODULES = {
    "HuggingFaceCallback": "hugging_face",
    "LightningCallback": "lightning",
    "register_with_timm": "timm",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
