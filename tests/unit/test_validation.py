"""Wrong arguments of every public function end in one sentence: what was given, what works."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import colossal_nb as cnb
from colossal_nb.models import BERT, GPT, MLP, Llama, ViT
from colossal_nb.validation import called_as, real_number, whole_number

X = torch.arange(8).view(2, 4) % 11
DATA = [(torch.ones(3), 1)] * 6


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


@pytest.fixture(scope="module")
def model() -> nn.Module:
    made: nn.Module = cnb.parallelize(GPT(11, layers=1, hidden=8, heads=2, max_length=8), strategy="dp=1")
    return made


def frozen() -> nn.Module:
    made: nn.Module = cnb.parallelize(MLP(3, 4, 5).requires_grad_(False), strategy="dp=1")
    return made


def opened(block: Any) -> None:
    with block:
        pass


def step(model: Any, loss: Any = loss_fn, inputs: Any = X, targets: Any = X) -> Any:
    return cnb.forward_backward(model, loss, inputs, targets)


class Detached(nn.Module):
    """Computes its own loss, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(x).mean().detach()}


# What is called with the model, words of the sentence.
WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda _: cnb.Strategy("dp=0"), r"a text is read by Strategy.parse\('dp=0'\)"),
    (lambda _: cnb.Strategy(dp=0), "dp=0: dp is a whole number from 1"),
    (lambda _: cnb.Strategy(tp="2"), "tp='2': tp is a whole number from 1"),
    (lambda _: cnb.Strategy(tensor=2), "there is no field 'tensor'; did you mean tp=2"),
    (lambda _: cnb.Strategy(*range(1, 20)), "19 values for 14 fields"),
    (lambda _: cnb.log(3), r"log: too many positional arguments; it is called as cnb.log\(accuracy=0.91\)"),
    (lambda _: cnb.log(a="3"), r"log\(a='3'\): a value is one number"),
    (lambda _: cnb.log(a=torch.ones(2)), "a value is one number"),
    (lambda _: cnb.log(a=10**400), "a value is one number"),
    (lambda _: cnb.schedule(), "schedule: missing a required argument: 'name'; it is called as"),
    (lambda _: cnb.schedule(3, 2, 4), "schedule 3 is not built; built: 1f1b, gpipe"),
    (lambda _: cnb.schedule(["1f1b"], 2, 4), "is not built"),
    (lambda _: cnb.schedule("1f1b", "2", 4), "p='2': p is a whole number, at least 1"),
    (lambda _: cnb.schedule("1f1b", 2, 4.5), "m=4.5: m is a whole number, at least 1"),
    (lambda m: cnb.forward_backward(m, loss_fn), "missing a required argument: 'inputs'; it is called as loss = "),
    (lambda m: cnb.forward_backward(m, loss=loss_fn), "it is called as"),
    (lambda m: step(m, targets=None), "called with targets=None, because none were given"),
    (lambda m: step(m, lambda output: output.mean()), r"loss_fn is called as loss_fn\(output, targets\), and"),
    (lambda m: step(m, "mse"), "loss_fn='mse' is no function"),
    (lambda m: step(m, nn.CrossEntropyLoss), r"an object of it is wanted: CrossEntropyLoss\(\)"),
    (lambda m: step(m, targets=X.numpy()), r"NumPy ndarray; tensors are cut: torch.as_tensor\(targets\)"),
    (lambda m: step(m, lambda output, _: (output.sum(), "3")), r"returned \(sum, '3'\): the count is one number"),
    (lambda m: step(m, lambda output, _: (output.sum(), -3)), r"returned \(sum, -3\): the count is one number"),
    (lambda m: step(m, lambda output, _: (output.sum(), None)), "the count is one number"),
    (lambda _: step(loss_fn), "the first argument is the model, as cnb.parallelize returned it, not function"),
    (lambda _: step(frozen(), lambda o, _: o.mean(), torch.ones(2, 3)), "all parameters are frozen"),
    (lambda _: step(cnb.parallelize(Detached(), strategy="dp=1"), None, torch.ones(2, 3)), "a loss without a gradient"),
    (lambda _: cnb.verify(frozen(), loss_fn, torch.ones(2, 3), X), "all 4 parameters are frozen"),
    (lambda m: cnb.verify(m, loss_fn, X), "called with targets=None"),
    (lambda m: cnb.verify(m, 3, X, X), "loss_fn=3 is no function"),
    (lambda m: cnb.verify(m, loss_fn, X, X, steps="3"), "steps='3': steps is a whole number, at least 1"),
    (lambda _: opened(cnb.accumulate(0)), "accumulate takes the model, not 0"),
    (lambda _: opened(cnb.accumulate(-1)), "accumulate takes the model, not -1"),
    (lambda _: opened(cnb.accumulate("2")), "accumulate takes the model, not '2'"),
    (lambda _: opened(cnb.accumulate()), "it is called as with cnb.accumulate"),
    (lambda _: opened(cnb.lazy(3)), "it is called as with cnb.lazy"),
    (lambda _: cnb.loader(DATA, 0), "batch_size=0: batch_size is a whole number, at least 1"),
    (lambda _: cnb.loader(DATA, "4"), "batch_size='4'"),
    (lambda _: cnb.loader(DATA, float("inf")), "batch_size=inf"),
    (lambda _: cnb.loader(DATA, True), "batch_size=True"),
    (lambda _: cnb.loader(DATA, 10**12, drop_last=True), "no batch of 1000000000000 in a dataset of 6 samples"),
    (lambda _: cnb.loader(DATA, 2, seed=None), "seed=None: seed is a whole number from"),
    (lambda _: cnb.loader(DATA, 2, seed=10**40), "seed is a whole number from"),
    (lambda _: cnb.loader(DATA, 2, num_workers=1.5), "num_workers=1.5"),
    (lambda _: cnb.loader(DATA, 2, collate_fn=3), "int is no function"),
    (lambda _: cnb.loader({"a": 1}, 1), r"with len\(\) and \[index\], not dict"),
    (lambda _: cnb.loader(list, 1), "not the class list"),
    (lambda _: cnb.loader(DATA, 2, sampler=3), "unexpected keyword argument 'sampler'; it is called as"),
    (lambda m: cnb.generate(m, X.bool(), 2), r"int64 or int32, of shape .* not torch.bool \[2, 4\]"),
    (lambda m: cnb.generate(m, X.to(torch.complex64), 2), "not torch.complex64"),
    (lambda m: cnb.generate(m, X[None], 2), r"not torch.int64 \[1, 2, 4\]"),
    (lambda m: cnb.generate(m, [1, 2], 2), "not list"),
    (lambda m: cnb.generate(m, X, 2.5), "new_tokens=2.5: new_tokens is a whole number, at least 0"),
    (lambda m: cnb.generate(m, X, 2, temperature="a"), "temperature='a': temperature is a number of at least 0"),
    (lambda m: cnb.generate(m, X, 2, temperature=float("nan")), "temperature=nan"),
    (lambda m: cnb.generate(m, X, 2, eos="a"), "eos='a': eos is a whole number"),
    (lambda m: cnb.generate(m, X, 2, generator=3), "generator is a torch.Generator or None, not int"),
    (lambda m: cnb.generate(m, X), "missing a required argument: 'new_tokens'"),
    (lambda m: cnb.full(m, 3), r"it is called as cnb.full\("),
    (lambda _: cnb.init(backend="gloo"), r"it is called as cnb.init\("),
    (lambda m: cnb.save("", m), "a string or a pathlib.Path, not ''"),
    (lambda m: cnb.save("a\0b", m), "a string or a pathlib.Path, not 'a"),
    (lambda m: cnb.save("a", m, wait="no"), "wait='no': True, or False"),
    (lambda m: cnb.load("a"), "missing a required argument: 'model'"),
    (lambda m: cnb.load("a", m, step=3), "unexpected keyword argument 'step'"),
    (lambda m: cnb.redistribute(m, "dp=1"), 'a strategy goes by name, strategy="dp=1"'),
    (lambda _: cnb.recover(3), "the first argument is the model"),
    (lambda _: cnb.parallelize(GPT), r"not the class GPT: give GPT\(...\)"),
    (lambda _: cnb.parallelize(MLP(3, 4, 5), torch.optim.SGD), r"make one, SGD\(model.parameters\(\), ...\)"),
    (lambda _: cnb.parallelize(MLP(3, 4, 5), ["adam"]), "optimizer must be a torch.optim.Optimizer, not str"),
    (lambda _: cnb.corpus.batches("3", 4, 5), "count='3'"),
    (lambda _: cnb.corpus.batches(3, 4.5, 5), "batch_size=4.5"),
    (lambda _: cnb.corpus.batches(3, 4, 5, seed="a"), "seed='a'"),
    (lambda _: GPT("a", 1, 8, 2), "vocab_size='a': each must be a whole number"),
    (lambda _: GPT(11, 1, 8.0, 2), "hidden=8.0"),
    (lambda _: BERT(11, 1, 8, 2, dropout=2), "dropout=2: a probability, 0 to 1"),
    (lambda _: Llama(11, 1, 8, 2, dropout="x"), "dropout='x'"),
    (lambda _: ViT(8, 4, 10, 1, 8, 2, channels="x"), "channels='x'"),
    (lambda _: MLP(3, 0, 5), "hidden=0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG, ids=range(len(WRONG)))
def test_one_sentence(model: nn.Module, call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call(model)


def test_every_public_function_says_how_it_is_called() -> None:
    functions = [each for name in cnb.__all__ if callable(each := getattr(cnb, name)) and not isinstance(each, type)]
    assert len(functions) == 17
    for function in functions:
        with pytest.raises(TypeError, match="too many positional arguments; it is called as"):
            function(*range(20))


def test_numbers_of_other_libraries_are_numbers() -> None:
    assert [whole_number("n", each) for each in (3, np.int64(3), torch.tensor(3))] == [3, 3, 3]
    assert [real_number("n", each, 0) for each in (0.5, np.float32(0.5), torch.tensor(0.5))] == [0.5] * 3
    batch = next(iter(cnb.loader(DATA, np.int64(4))))
    assert len(batch[0]) == 4


def test_a_type_error_inside_a_function_stays_its_own() -> None:
    @called_as("f(1)")
    def f(x: int) -> int:
        return x + None  # type: ignore[operator]

    with pytest.raises(TypeError, match=r"^unsupported operand"):
        f(1)
