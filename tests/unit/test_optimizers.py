"""Which optimizers can update parts of a model."""

import pytest
import torch

from colossal_nb.parallel.optimizers import require_able
from colossal_nb.plan import Strategy


class Signed(torch.optim.Optimizer):
    """One of a user's own."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(2, 2))], {})

    def step(self, closure: None = None) -> None:
        """Not called here."""


class Known(Signed):
    elementwise = True


@pytest.mark.parametrize("strategy", ["tp=2", "pp=2", "dp=2 tp=2"])
def test_one_of_a_users_own_says_itself_that_it_is_able(strategy: str) -> None:
    mesh = Strategy.parse(strategy).mesh()
    with pytest.raises(ValueError, match=r"Signed is not known .* say so: Signed.elementwise = True"):
        require_able(Signed(), mesh)
    require_able(Known(), mesh)


def test_under_dp_alone_any_is() -> None:
    require_able(Signed(), Strategy.parse("dp=2").mesh())


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor])
def test_one_that_takes_a_matrix_as_a_whole(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(2, 2))])
    require_able(optimizer, Strategy.parse("dp=2 pp=2").mesh())
    with pytest.raises(ValueError, match=r"cannot run under tp: take SGD"):
        require_able(optimizer, Strategy.parse("tp=2 pp=2").mesh())
