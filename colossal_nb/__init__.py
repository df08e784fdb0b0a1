"""Interactive parallel training in PyTorch, made visible.

`%load_ext colossal_nb` in a notebook, then cells that begin with `%%colossal tp=2 pp=2`. Each public name is loaded at
its first use, so that importing this package costs neither torch nor IPython.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colossal_nb import corpus as corpus
    from colossal_nb import models as models
    from colossal_nb.parallel.checkpoint import load as load
    from colossal_nb.parallel.checkpoint import save as save
    from colossal_nb.parallel.generate import generate as generate
    from colossal_nb.parallel.init import init as init
    from colossal_nb.parallel.lazy import lazy as lazy
    from colossal_nb.parallel.loader import loader as loader
    from colossal_nb.parallel.once import once as once
    from colossal_nb.parallel.parallelize import parallelize as parallelize
    from colossal_nb.parallel.recover import recover as recover
    from colossal_nb.parallel.redistribute import redistribute as redistribute
    from colossal_nb.parallel.state import full as full
    from colossal_nb.parallel.state import full_grad as full_grad
    from colossal_nb.parallel.step import accumulate as accumulate
    from colossal_nb.parallel.step import forward_backward as forward_backward
    from colossal_nb.parallel.step import log as log
    from colossal_nb.parallel.verify import verify as verify
    from colossal_nb.plan import Strategy as Strategy
    from colossal_nb.plan import schedule as schedule

_HOME = {
    "Strategy": "colossal_nb.plan",
    "accumulate": "colossal_nb.parallel.step",
    "forward_backward": "colossal_nb.parallel.step",
    "full": "colossal_nb.parallel.state",
    "full_grad": "colossal_nb.parallel.state",
    "generate": "colossal_nb.parallel.generate",
    "init": "colossal_nb.parallel.init",
    "lazy": "colossal_nb.parallel.lazy",
    "load": "colossal_nb.parallel.checkpoint",
    "loader": "colossal_nb.parallel.loader",
    "log": "colossal_nb.parallel.step",
    "once": "colossal_nb.parallel.once",
    "parallelize": "colossal_nb.parallel.parallelize",
    "recover": "colossal_nb.parallel.recover",
    "redistribute": "colossal_nb.parallel.redistribute",
    "save": "colossal_nb.parallel.checkpoint",
    "schedule": "colossal_nb.plan",
    "verify": "colossal_nb.parallel.verify",
}
_MODULES = ("corpus", "models")

__all__ = [
    "Strategy",
    "accumulate",
    "corpus",
    "forward_backward",
    "full",
    "full_grad",
    "generate",
    "init",
    "lazy",
    "load",
    "loader",
    "log",
    "models",
    "once",
    "parallelize",
    "recover",
    "redistribute",
    "save",
    "schedule",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"colossal_nb.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'colossal_nb' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext colossal_nb` calls: registers the magics."""
    import_module("colossal_nb.notebook").load_ipython_extension(shell)


def unload_ipython_extension(shell: Any) -> None:
    """What `%unload_ext colossal_nb` calls."""
    import_module("colossal_nb.notebook").unload_ipython_extension(shell)
