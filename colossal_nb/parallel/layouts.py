"""The Layout on a parameter: the language in which the passes of `parallelize` speak with each other."""

from torch import Tensor

from colossal_nb.plan.layout import Layout

_NAME = "_colossal_layout"


def layout_of(p: Tensor) -> Layout | None:
    """The layout of a distributed parameter; None for a plain tensor."""
    return getattr(p, _NAME, None)


def set_layout(p: Tensor, layout: Layout | None) -> None:
    """Say how `p`, the local part, belongs to the whole tensor; None makes it plain again."""
    if layout is None:
        p.__dict__.pop(_NAME, None)
    else:
        setattr(p, _NAME, layout)
