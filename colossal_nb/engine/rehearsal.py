"""What costs a second at its first use is used once in the fork server; the ranks inherit the parsed files."""
from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from IPython.core.ultratb import AutoFormattedTB


def rehearse() -> None:
    """Format tracebacks through torch's sources. Computes nothing: that would start threads."""
    make: Any = AutoFormattedTB
    formatter = make(mode="Context", theme_name="linux", tb_offset=0)
    model: Any = torch.nn.Sequential(torch.nn.ReLU())
    failures: list[Callable[[], Any]] = [lambda: model(None), lambda: json.loads("[")]
    for fail in failures:
        try:
            fail()
        except Exception as error:
            formatter.structured_traceback(type(error), error, error.__traceback__)
