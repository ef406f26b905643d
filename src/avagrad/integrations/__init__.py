"""Callbacks that log an optimizer's numbers in Hugging Face's Trainer and in Lightning, and names for timm.

>>> from avagrad.integrations import register_with_timm

The frameworks are imported when a name is asked for.
"""

import importlib
from typing import Any

__all__ = ["HuggingFaceCallback", "LightningCallback", "register_with_timm"]

_PLACES = {
    "HuggingFaceCallback": "hugging_face",
    "LightningCallback": "lightning",
    "register_with_timm": "timm",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
