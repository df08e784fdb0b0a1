"""A planted fault is found, and `verify` says where it is and what it looks like."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_gpt import INPUTS, TARGETS, gpt, loss_fn, train
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.models import GPT
from colossal_nb.parallel import gradients
from colossal_nb.parallel.pipeline.stage import Stage
from colossal_nb.parallel.tensor import linear1d
from colossal_nb.parallel.verify.evidence import Facts, words
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks


@contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute is another: the pool's processes live on."""
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


def parallel_gpt(strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(vocab_size=29, layers=4, hidden=16, heads=4, max_length=8)
    made: tuple[nn.Module, torch.optim.Optimizer] = cnb.parallelize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), strategy
    )
    return made


def found(model: nn.Module) -> tuple[bool, str, str]:
    result = cnb.verify(model, loss_fn, INPUTS, TARGETS, steps=2)
    return bool(result), result.cause, str(result)


def no_sum_in_backward(strategy: str) -> tuple[bool, str, str]:
    """The gradient of the input of blocks.2.up is not summed over tp."""
    model, _ = parallel_gpt(strategy)
    right = linear1d.copy_to

    def copy_to(x: Any, mesh: Any, axis: Any, *, of: str) -> Any:
        return x if of == "blocks.2.up" else right(x, mesh, axis, of=of)

    with replaced(linear1d, "copy_to", copy_to):
        return found(model)


def no_sum_over_dp(strategy: str) -> tuple[bool, str, str]:
    model, _ = parallel_gpt(strategy)
    with replaced(gradients, "sum_over", lambda parameters, *_, **__: [p.grad for p in parameters]):
        return found(model)


def wrong_scale(strategy: str) -> tuple[bool, str, str]:
    model, _ = parallel_gpt(strategy)
    right = gradients.finish
    with replaced(gradients, "finish", lambda parallel, active, count: right(parallel, active, count / 2)):
        return found(model)


def exchanged(strategy: str) -> tuple[bool, str, str]:
    """Ranks 0 and 1 have each other's rows of one weight."""
    model, _ = parallel_gpt(strategy)
    rank, weight = World.current().rank, model.blocks[1].up.weight
    parts = [torch.empty_like(weight) for _ in range(2)]
    World.current().whole().run("all_gather", [*parts, weight.detach()])
    weight.data.copy_(parts[1 - rank])
    return found(model)


def stage_twice(strategy: str) -> tuple[bool, str, str]:
    """The second stage's last block runs twice on each microbatch."""
    model, _ = parallel_gpt(strategy)
    right = Stage.run

    def run(self: Stage, *args: Any, **keywords: Any) -> Any:
        block = self.model.blocks[3]
        if self.number != 1 or isinstance(block.forward, Twice):
            return right(self, *args, **keywords)
        with replaced(block, "forward", Twice(block.forward)):
            return right(self, *args, **keywords)

    with replaced(Stage, "run", run):
        return found(model)


class Twice:
    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, x: Any) -> Any:
        return self.forward(self.forward(x))


CASES = [
    (2, "tp=2", no_sum_in_backward, ("gradient of blocks.2.norm_2.bias", "a missing all-reduce over tp")),
    (2, "dp=2", no_sum_over_dp, ("gradient of head.weight", "a missing all-reduce over dp")),
    (2, "dp=2", wrong_scale, ("gradient of head.weight", "2 times the sequential one on ranks 0,1")),
    (2, "tp=2", exchanged, ("blocks.1.up.weight", "rows 0..31 and rows 32..63", "slices exchanged")),
    (2, "pp=2", stage_twice, ("blocks.3", "output")),
]


@pytest.mark.parametrize(("count", "strategy", "plant", "words"), CASES)
def test_a_planted_fault_is_found_and_located(
    ranks: Any, count: int, strategy: str, plant: Any, words: tuple[str, ...]
) -> None:
    outcomes = ranks(count).run(plant, strategy)
    for ok, cause, text in outcomes:
        assert not ok, text
        assert (cause, text) == outcomes[0][1:]
        for word in words:
            assert word in cause, text


def scaled(strategy: str) -> list[str]:
    """What is said of an output that is 1.02 times the right one on rank 1: of up, of down, of the second dropout."""
    said, rank = [], World.current().rank
    for at in ("up", "down", "drop"):
        torch.manual_seed(0)
        model = GPT(vocab_size=29, layers=2, hidden=16, heads=4, max_length=8, dropout=0.1)
        made = cnb.parallelize(model, strategy=strategy)
        calls = [0]

        def hook(module: nn.Module, args: Any, y: Tensor, at: str = at, calls: list[int] = calls) -> Tensor:
            calls[0] += 1
            return y * 1.02 if rank == 1 and (at != "drop" or calls[0] % 2 == 0) else y

        getattr(made.blocks[0], at).register_forward_hook(hook)
        said.append(found(made)[1])
    return said


@pytest.mark.parametrize("strategy", ["dp=2", "tp=2"])
def test_the_call_that_is_wrong_is_named(ranks: Any, strategy: str) -> None:
    for up, down, drop in ranks(2).run(scaled, strategy):
        assert "the output of blocks.0.up is the first in a forward that differs (by 2.0e-02" in up
        assert "the output of blocks.0.down is the first in a forward that differs (by 2.0e-02" in down
        assert "the output of blocks.0.drop (call 2 of 2) is the first in a forward that differs (by 2.0e-02" in drop


def facts(factor: float) -> Facts:
    return Facts(wrong=True, factor=factor, like=None, summed=(), rows=(), of=4, digest=1, place="")


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ((1.02, 1.0200001), "1.02"),
        ((0.999876543, 0.999876543), "0.999877"),
        ((2.0004, 2.0), "2"),
        ((1.5, 1.5), "1.5"),
        ((1 / 3, 1 / 3), "0.33"),
    ],
)
def test_a_factor_never_reads_as_1(factors: tuple[float, ...], said: str) -> None:
    every = {1: facts(factors[0]), 3: facts(factors[1])}
    assert words("gradient", every) == f"is {said} times the sequential one on ranks 1,3: a wrong scale"
    assert words("weight", {1: facts(1.02), 3: facts(1.04)}) == ""


def by_rank(model: nn.Module) -> None:
    """Wrong on rank 1."""
    rank = World.current().rank
    model.blocks[1].up.weight.register_hook(lambda g: g * (3.0 if rank == 1 else 1.0))
    model.norm.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(1 + rank))


def filtered(model: nn.Module) -> dict[str, Any]:
    """Right, with a state that the next step depends on; and one that a copy of the model could not run alone."""
    means: dict[str, Tensor] = {}

    def hook_of(name: str) -> Any:
        def hook(g: Tensor) -> Tensor:
            means[name] = 0.9 * means.get(name, torch.zeros(())) + 0.1 * g
            return g + 2 * means[name]

        return hook

    for name, p in model.named_parameters():
        p.register_hook(hook_of(name))
    model.norm.bias.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1e-3, 1e-3))
    return means


def hooked(strategy: str) -> tuple[Any, ...]:
    model = gpt()
    model, _ = cnb.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), strategy)
    means = filtered(model)
    right = cnb.verify(model, loss_fn, INPUTS, TARGETS)
    assert not means
    model.blocks[0].up.bias.register_hook(lambda g: dist.all_reduce(g))
    left_out = cnb.verify(model, loss_fn, INPUTS, TARGETS)
    by_rank(model)
    wrong = cnb.verify(model, loss_fn, INPUTS, TARGETS)
    return bool(right), str(right), bool(left_out), str(left_out), bool(wrong), {row.name for row in wrong.wrong}


@pytest.mark.parametrize("strategy", ["dp=2", "tp=2"])
def test_hooks_on_parameters_run_in_both_programs(ranks: Any, strategy: str) -> None:
    for right, text, left_out, said, wrong, names in ranks(2).run(hooked, strategy):
        assert right, text
        assert "left out" not in text
        assert left_out, said
        assert "left out are hooks on blocks.0.up.bias, which cannot run on copies (" in said
        assert not wrong
        assert {"blocks.1.up.weight", "norm.weight"} <= names


def chosen(strategy: str) -> list[str]:
    model, said = cnb.parallelize(gpt(), strategy=strategy), []
    said.append(cnb.verify(model, loss_fn, INPUTS, TARGETS).sentence)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    train(model, optimizer, 2)
    before = [p.detach().clone() for p in model.parameters()]
    said.append(cnb.verify(model, loss_fn, INPUTS, TARGETS).sentence)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return said


def test_the_verdict_names_the_optimizer(ranks: Any) -> None:
    for plain, own in ranks(2).run(chosen, "tp=2"):
        assert "3 steps of forward_backward with plain SGD, as no optimizer of this model was given to" in plain
        assert own.startswith("verified: tp=2 equals the sequential program over 3 steps of forward_backward with Ada")
