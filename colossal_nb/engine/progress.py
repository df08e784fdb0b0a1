"""Progress bars on ranks are text: widgets of a rank would have no page, and text bars are merged in the notebook."""
from __future__ import annotations

import importlib
import sys
import types
from typing import Any

_WITH_WIDGETS = ("tqdm.notebook", "tqdm.autonotebook")


class _Text(types.ModuleType):
    """Stands for a module of tqdm that draws widgets, with the names of the one that draws text."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module("tqdm.std"), name)


def install() -> None:
    """Before anything imports tqdm; costs nothing unless it does."""
    for name in _WITH_WIDGETS:
        sys.modules[name] = _Text(name)
