"""What costs a second at its first use is used once in the fork server; the ranks inherit the parsed files."""
from __future__ import annotations

from typing import Any

import jedi
import torch
from IPython.core.ultratb import AutoFormattedTB


def rehearse() -> None:
    """Format tracebacks through torch's sources, complete a name. Starts no thread and opens nothing that stays."""
    formatter: Any = AutoFormattedTB(mode="Context", theme_name="linux", tb_offset=0)
    for fail in (lambda: torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.ones(3)),
                 lambda: torch.nn.functional.cross_entropy(torch.ones(2, 2), torch.ones(3)), lambda: {}["key"]):
        try:
            fail()
        except Exception as error:
            formatter.structured_traceback(type(error), error, error.__traceback__)
    jedi.Interpreter("value.", [{"value": 1}]).complete(1, 6)
