"""What a checkpoint holds: global names and shapes, ties once, random states, buffers, plain values."""

import json
import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_gpt import INPUTS, TARGETS, close, gpt, loss_fn, train
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import colossal_nb as cnb
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def content_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "checkpoint.json").read_text().split("\n")[1])
    return content


def trained(strategy: str, tied: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = gpt(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    train(model, optimizer, 2)
    return model, optimizer


def save_trained(path: Path, strategy: str, tied: bool) -> dict[str, Tensor]:
    model, optimizer = trained(strategy, tied)
    cnb.save(path, model, optimizer)
    return whole(model)


@pytest.mark.parametrize("tied", [False, True])
def test_the_files_hold_the_users_shapes_each_weight_once(ranks: Any, tmp_path: Path, tied: bool) -> None:
    ranks(4).run(save_trained, tmp_path / "run", "tp=2 pp=2", tied)
    content, model = content_of(tmp_path / "run"), gpt(tied)
    own = {name: list(p.shape) for name, p in model.named_parameters()}
    stored = {name: each["shape"] for name, each in content["tensors"].items()}
    assert {name: stored[f"model.{name}"] for name in own} == own
    assert content["aliases"] == ({"head.weight": "token.weight"} if tied else {})
    moments = [f"optimizer.0.{name}.{key}" for name in own for key in ("exp_avg", "exp_avg_sq")]
    assert set(stored) == {*(f"model.{name}" for name in own), *moments}
    for each in content["tensors"].values():
        elements = sum(np.prod(sizes, dtype=int) for _, sizes, *_ in each["chunks"])
        assert elements == np.prod(each["shape"], dtype=int)


def test_every_rank_writes_its_part(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(save_trained, tmp_path / "run", "tp=2 pp=2", False)
    content = content_of(tmp_path / "run")
    assert content["files"].pop(".metadata")[0] > 0
    sizes = [size for size, _ in content["files"].values()]
    assert sorted(content["files"]) == [f"__{rank}_0.distcp" for rank in range(4)]
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_model_in_a_plain_process_reads_it(ranks: Any, tmp_path: Path, tied: bool) -> None:
    expected = ranks(4).run(save_trained, tmp_path / "run", "tp=2 pp=2", tied)[0]
    model = gpt(tied)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    assert cnb.load(tmp_path / "run", model, optimizer) == {}
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert {entry["step"].item() for entry in optimizer.state.values()} == {2.0}
    assert len(optimizer.state) == len(list(model.parameters()))
    assert model.token.weight is model.head.weight or not tied


def load_plain(path: Path, strategy: str) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(3)
    model, optimizer = trained(strategy, False)
    cnb.load(path, model, optimizer)
    return whole(model), train(model, optimizer, 2)


@pytest.mark.parametrize("strategy", ["tp=2", "pp=2"])
def test_a_model_that_was_never_parallel_is_saved_for_all(ranks: Any, tmp_path: Path, strategy: str) -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        loss_fn(model(INPUTS), TARGETS).backward()
        optimizer.step()
    cnb.save(tmp_path / "run", model, optimizer)
    saved, expected = whole(model), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_fn(model(INPUTS), TARGETS)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for weights, losses in ranks(2).run(load_plain, tmp_path / "run", strategy):
        assert all(torch.equal(weights[name], value) for name, value in saved.items())
        close(torch.tensor(losses), torch.tensor(expected))


def test_torchs_own_tools_read_the_data(ranks: Any, tmp_path: Path) -> None:
    expected = ranks(2).run(save_trained, tmp_path / "run", "tp=2", False)[0]
    (data,) = (tmp_path / "run").glob("data-*")
    dcp_to_torch_save(data, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in expected.items())


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    model = gpt()
    cnb.save(tmp_path / "run", model)
    (data,) = (tmp_path / "run").glob("data-*")
    (data / ".metadata").write_bytes(b"cos\nabort\n(tR.")  # would end this process
    with pytest.raises(ValueError, match="damaged"):
        cnb.load(tmp_path / "run", gpt())
    content, head = content_of(tmp_path / "run"), tmp_path / "run" / "checkpoint.json"
    del content["files"][".metadata"]  # so that nothing is known of it
    text = json.dumps(content)
    about = {"format": "colossal_nb checkpoint", "version": 1, "crc32": zlib.crc32(text.encode())}
    head.write_text(f"{json.dumps(about)}\n{text}\n")
    cnb.load(tmp_path / "run", gpt())


def drawn(path: Path, load: bool) -> list[float]:
    model, optimizer = trained("tp=2", False)
    if load:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        cnb.load(path, model, optimizer)
    else:
        torch.randn(3)
        np.random.standard_normal(3)
        cnb.save(path, model, optimizer)
    return [torch.randn(1).item(), np.random.standard_normal(), random.random()]


def test_random_numbers_go_on(ranks: Any, tmp_path: Path) -> None:
    expected = ranks(2).run(drawn, tmp_path / "run", False)
    assert ranks(2).run(drawn, tmp_path / "run", True) == [expected[0], expected[0]]


def normed() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)]
    return nn.Sequential(*layers).double()


def train_normed(path: Path, strategy: str | None, load: bool) -> tuple[dict[str, Tensor], list[float]]:
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if strategy is not None:
        model, optimizer = cnb.parallelize(model, optimizer, strategy)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 6, generator=generator).double(), torch.randint(5, (8,), generator=generator)
    losses = []
    if load:
        cnb.load(path, model, optimizer)
    for step in range(4):
        if step == 2 and not load:
            cnb.save(path, model, optimizer)
        if step < 2 and load:
            continue
        optimizer.zero_grad()
        if strategy is None:
            loss = loss_fn(model(x), y)
            loss.backward()
        else:
            loss = cnb.forward_backward(model, loss_fn, x, y)
        optimizer.step()
        losses.append(loss.item())
    return whole(model), losses[-2:]


@pytest.mark.parametrize(("saved", "loaded"), [
    (None, "pp=2 microbatches=1"), ("pp=2 microbatches=1", None), ("dp=2", "pp=2 microbatches=2"),
])  # fmt: skip
def test_buffers_of_all_stages(ranks: Any, tmp_path: Path, saved: str | None, loaded: str | None) -> None:
    def run(strategy: str | None, load: bool) -> Any:
        if strategy is None:
            return [train_normed(tmp_path / "run", None, load)]
        return ranks(2).run(train_normed, tmp_path / "run", strategy, load)

    weights, losses = run(saved, False)[0]
    for found, later in run(loaded, True):
        close(torch.tensor(later), torch.tensor(losses))
        for name, value in weights.items():
            close(found[name], value)


def two_optimizers(path: Path, strategy: str, load: bool) -> list[float]:
    model = gpt()
    blocks = list(model.blocks.parameters())
    pair = [
        torch.optim.AdamW(blocks, lr=1e-2),
        torch.optim.SGD(
            [p for name, p in model.named_parameters() if "blocks" not in name], lr=0.1, momentum=0.9, nesterov=True
        ),
    ]
    model, _ = cnb.parallelize(model, pair[0], strategy)
    cnb.parallelize(model, pair[1])
    losses = []
    if load:
        cnb.load(path, model, pair)
    for step in range(4):
        if step == 2 and not load:
            cnb.save(path, model, pair)
        if step < 2 and load:
            continue
        model.zero_grad()
        losses.append(cnb.forward_backward(model, loss_fn, INPUTS, TARGETS).item())
        for each in pair:
            each.step()
    return losses[-2:]


def test_several_optimizers(ranks: Any, tmp_path: Path) -> None:
    expected = ranks(2).run(two_optimizers, tmp_path / "run", "tp=2", False)[0]
    for losses in ranks(4).run(two_optimizers, tmp_path / "run", "dp=2 pp=2", True):
        close(torch.tensor(losses), torch.tensor(expected))


VALUES: dict[str, Any] = {
    "step": 7,
    "huge": 2**80,
    "losses": [1.0, 0.1 + 0.2, float("inf")],
    "name": "späti",
    "nothing": None,
    "flag": True,
    "pair": (1, ("a", 2.5)),
    "kinds": {"a", "b"},
    "by_number": {1: "x", (2, 3): [torch.float32 is None]},
    "marks": {"~tuple": [1]},
    "counts": Counter({3: 2, 1: 1}),
    "whole": torch.arange(6).view(2, 3),
    "half": [torch.ones(3, dtype=torch.bfloat16)],
    "number": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
}


def same(found: Any, given: Any) -> None:
    assert type(found) is type(given)
    if isinstance(given, Tensor):
        assert found.dtype == given.dtype
        assert torch.equal(found, given)
    elif isinstance(given, dict):
        assert found.keys() == given.keys()
        for key, value in given.items():
            same(found[key], value)
    elif isinstance(given, list | tuple):
        assert len(found) == len(given)
        for one, other in zip(found, given, strict=True):
            same(one, other)
    else:
        assert found == given


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    model = gpt()
    cnb.save(tmp_path / "run", model, **VALUES)
    extra = cnb.load(tmp_path / "run", model)
    same(extra, VALUES)
    cnb.save(tmp_path / "run", model, count=np.int64(3), share=np.float32(0.5), ema=nn.Linear(2, 2))
    extra = cnb.load(tmp_path / "run", model)
    assert (extra["count"], extra["share"], list(extra["ema"])) == (3, 0.5, ["weight", "bias"])


class Own:
    pass


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({"a": [1, Own()]}, "odd['a'][1] is a Own"),
        (np.zeros(3), "torch.from_numpy"),
        (print, "odd is a builtin_function_or_method"),
        (torch.optim.SGD([torch.zeros(1, requires_grad=True)]), "third argument"),
    ],
)
def test_other_values_are_named(tmp_path: Path, value: Any, names: str) -> None:
    with pytest.raises(ValueError, match="odd") as raised:
        cnb.save(tmp_path / "run", gpt(), odd=value)
    assert names in str(raised.value)
    assert not (tmp_path / "run").exists()


def save_what_differs(path: Path, what: str) -> str:
    model, optimizer = trained("tp=2", False)
    rank = World.current().rank
    given: Any = {
        "shard": {"ema": [p.detach().clone() for p in model.parameters()]},
        "parameter": next(iter(model.parameters())),
        "seconds": {"seconds": 1.5 * rank},
    }[what]
    try:
        cnb.save(path, model, optimizer, mine=given)
    except ValueError as error:
        return str(error)
    return ""


def test_tensors_that_differ_between_ranks(ranks: Any, tmp_path: Path) -> None:
    for what, text in [("shard", "the tensors in mine differ"), ("parameter", "cnb.full(it)"), ("seconds", "")]:
        said = ranks(2).run(save_what_differs, tmp_path / what, what)
        assert said[0] == said[1]
        assert said[0].startswith(text) or text in said[0]
    assert cnb.load(tmp_path / "seconds", gpt())["mine"] == {"seconds": 0.0}
