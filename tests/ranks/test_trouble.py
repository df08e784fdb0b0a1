"""After a stop or an error inside a step: whole weights train on, torn ones are refused with the way back."""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_gpt import INPUTS, TARGETS, close, gpt, loss_fn, train
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.parallel import checkpoint, gradients, loss_scale
from colossal_nb.parallel.saving import fill
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks

Pair = tuple[nn.Module, torch.optim.Optimizer]
STEPS = 4


def start(strategy: str, make: Callable[[], nn.Module] = gpt) -> Pair:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    return model, optimizer


def regroup() -> None:
    """What follows a stop and an error in a notebook."""
    world = World.current()
    world.regroup(world.epoch + 1, world.ranks)
    world.tell_positions()
    world.whole().run("barrier", [])


def sequential(steps: int) -> dict[str, Tensor]:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model(INPUTS), TARGETS).backward()
        optimizer.step()
    return model.state_dict()


def check(states: list[dict[str, Tensor]], steps: int = STEPS) -> None:
    for state in states:
        for name, value in sequential(steps).items():
            close(state[name], value)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def pressed(strategy: str) -> tuple[dict[str, Tensor], list[str]]:
    """Stop reaches the last rank alone, in time for the exchange of the third forward_backward."""
    model, optimizer = start(strategy)
    world = World.current()
    train(model, optimizer, 2)
    world.stopping.asked = world.rank == world.world_size - 1
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 9)
    notes = list(world.notes)
    train(model, optimizer, 1)  # in the user's own handler: the groups are whole
    regroup()
    train(model, optimizer, STEPS - 3)
    return whole(model), notes


@pytest.mark.parametrize(
    ("count", "strategy"), [(1, "dp=1"), (2, "dp=2"), (2, "tp=2"), (4, "dp=2 pp=2 microbatches=2")]
)
def test_a_stop_that_reaches_one_rank_lands_on_all_between_steps(ranks: Any, count: int, strategy: str) -> None:
    results = ranks(count).run(pressed, strategy)
    check([state for state, _ in results])
    assert all("the weights of step 2 are whole on all ranks" in notes[-1] for _, notes in results)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def normed(strategy: str, press_at: int) -> tuple[list[Tensor], list[Tensor]]:
    model, optimizer = start(strategy, Normed)
    world, step = World.current(), 0
    while step < STEPS:
        inputs = torch.linspace(-1, 1, 32).double().view(8, 4) * (step + 1)
        world.stopping.asked = step == press_at
        try:
            optimizer.zero_grad()
            cnb.forward_backward(model, loss_fn, inputs, torch.arange(8) % 3)
        except KeyboardInterrupt:
            press_at = -1
            continue
        optimizer.step()
        step += 1
    return [p.detach().clone() for p in model.parameters()], [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("strategy", ["dp=2", "dp=2 microbatches=2"])
@pytest.mark.parametrize("press_at", [0, 2])
def test_a_forward_that_came_to_no_end_leaves_running_statistics_alone(
    ranks: Any, strategy: str, press_at: int
) -> None:
    expected = ranks(2).run(normed, strategy, -1)
    torch.testing.assert_close(ranks(2).run(normed, strategy, press_at), expected, rtol=0, atol=0)


def normed_behind(strategy: str, stops: bool) -> list[Tensor]:
    """Rank 1 is stopped at the very end of a forward_backward that rank 0 has ended."""
    model, optimizer = start(strategy, Normed)
    for step in range(STEPS):
        inputs = torch.linspace(-1, 1, 32).double().view(8, 4) * (step + 1)
        optimizer.zero_grad()
        if stops and step == 2:
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                if World.current().rank == 1:
                    patch.setattr(loss_scale, "seen", interrupted)
                cnb.forward_backward(model, loss_fn, inputs, torch.arange(8) % 3)
            regroup()
        cnb.forward_backward(model, loss_fn, inputs, torch.arange(8) % 3)
        optimizer.step()
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("strategy", ["dp=2", "tp=2", "pp=2"])
def test_running_statistics_that_some_ranks_moved_go_back(ranks: Any, strategy: str) -> None:
    expected = ranks(2).run(normed_behind, strategy, False)
    found = ranks(2).run(normed_behind, strategy, True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)  # NaN: another stage's weights


def torn(strategy: str, odd: int, path: Path | None = None) -> list[str]:
    """An error on one rank between forward_backward and step; what each use then says, on this rank."""
    model, optimizer = start(strategy)
    train(model, optimizer, 2)
    if path is not None:
        cnb.save(path, model, optimizer)
    optimizer.zero_grad()
    cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
    if World.current().rank != odd:
        optimizer.step()
    regroup()
    said = []
    p = next(p for p in model.parameters() if p.grad is not None)
    if World.current().rank == 0:
        with pytest.raises(ValueError, match="torn"):
            model.state_dict()  # on one rank alone: it waits for no other
    uses: list[Callable[[], Any]] = [
        optimizer.step,
        model.state_dict,
        copy.deepcopy(model).state_dict,
        lambda: cnb.full(p),
        lambda: cnb.full_grad(p),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: train(model, optimizer, 1),
        lambda: model(INPUTS),
        lambda: cnb.save("never", model),
        lambda: cnb.redistribute(model, optimizer, "dp=1"),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="torn") as caught:
            use()
        said.append(str(caught.value))
    twin = copy.deepcopy(model)
    regroup()
    with pytest.raises(ValueError, match="torn"):
        twin(INPUTS)
    if path is not None:
        cnb.load(path, model, optimizer)
        train(model, optimizer, STEPS - 2)
        check([whole(model)])
    return said


def test_torn_weights_are_refused_by_every_use_with_the_checkpoint_to_go_back_to(ranks: Any, tmp_path: Path) -> None:
    said = ranks(2).run(torn, "tp=2", 1, tmp_path / "run")
    assert said[0] == said[1]
    for text in said[0]:
        assert "rank 0 is at step 3, rank 1 is at step 2" in text
        assert f"cnb.load('{tmp_path / 'run'}', model, optimizer)" in text
    assert not Path("never").exists()


def test_without_a_checkpoint_the_model_is_made_again(ranks: Any) -> None:
    said = ranks(2).run(torn, "pp=2", 0)
    assert "run the cell that makes the model again" in said[0][0]


def went_on(strategy: str) -> dict[str, Tensor]:
    """Errors that left nothing torn: what one rank asks alone is answered, and a step() goes on without a forward."""
    model, optimizer = start(strategy)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
    for _ in range(2):
        regroup()
        if World.current().rank == 0:
            cnb.full(next(p for p in model.parameters()))
            copy.deepcopy(model)
    optimizer.step()
    regroup()
    train(model, optimizer, STEPS - 3)
    return whole(model)


@pytest.mark.parametrize("strategy", ["dp=2", "tp=2"])
def test_whole_weights_are_used_after_an_error_as_before(ranks: Any, strategy: str) -> None:
    check(ranks(2).run(went_on, strategy))


def recovered(strategy: str, odd: int) -> tuple[dict[str, Tensor], str, list[str]]:
    model, optimizer = start(strategy)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
    if World.current().rank != odd:
        optimizer.step()
    regroup()
    with pytest.raises(ValueError, match="torn") as caught:
        train(model, optimizer, 1)
    cnb.recover(model)
    notes = list(World.current().notes)
    train(model, optimizer, STEPS - 3)
    regroup()
    cnb.recover(model)
    assert "nothing to recover" in World.current().notes[-1]
    return whole(model), str(caught.value), notes


@pytest.mark.parametrize(
    ("count", "strategy", "odd", "given"), [(2, "dp=2", 0, "rank 1"), (4, "dp=2 tp=2", 3, "ranks 0 and 1")]
)
def test_a_whole_replica_gives_what_it_has(ranks: Any, count: int, strategy: str, odd: int, given: str) -> None:
    results = ranks(count).run(recovered, strategy, odd)
    check([state for state, _, _ in results])
    assert len({text for _, text, _ in results}) == 1
    assert f"cnb.recover(model) gives all ranks the weights and optimizer states of {given}" in results[0][1]
    assert "the weights of step 3 are whole on all ranks again" in results[0][2][-1]


def cut_short(strategy: str, where: str, on: tuple[int, ...]) -> tuple[str, dict[str, Tensor] | None, int]:
    """A step fails on some ranks: in a hook of the user's before the update or after it, or between two groups."""
    model = gpt()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": weights[:3]}, {"params": weights[3:]}], lr=1e-2)
    world, failing = World.current(), [False]

    def hook(*_: Any) -> None:
        if failing[0] and world.rank in on:
            if where == "after, writing":
                weights[0].detach().add_(0)
            raise RuntimeError("mine")

    if where != "inside":
        (optimizer.register_step_pre_hook if where == "before" else optimizer.register_step_post_hook)(hook)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    train(model, optimizer, 2)
    failing[0] = True
    optimizer.zero_grad()
    cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
    betas = optimizer.param_groups[1]["betas"]
    if where == "inside" and world.rank in on:
        optimizer.param_groups[1]["betas"] = None
    if world.rank in on:
        with pytest.raises(TypeError if where == "inside" else RuntimeError):
            optimizer.step()
    elif where != "before":
        optimizer.step()
    failing[0], optimizer.param_groups[1]["betas"] = False, betas
    regroup()
    step = 2 if where == "before" else 3
    try:
        optimizer.zero_grad()
        train(model, optimizer, STEPS - step)
    except ValueError as error:
        return str(error), None, 0
    return "", whole(model), model._colossal.step


@pytest.mark.parametrize("where", ["inside", "after, writing"])
def test_a_step_that_failed_half_way_is_found(ranks: Any, where: str) -> None:
    for text, _, _ in ranks(2).run(cut_short, "dp=2", where, (1,)):
        assert "optimizer.step() was cut short on rank 1" in text
        assert "of rank 0" in text


@pytest.mark.parametrize(
    ("where", "on", "strategy"), [("before", (1,), "dp=2"), ("after", (1,), "dp=2"), ("after", (0, 1), "tp=2")]
)
def test_a_step_that_failed_before_the_update_or_behind_it_is_none(
    ranks: Any, where: str, on: tuple[int, ...], strategy: str
) -> None:
    results = ranks(2).run(cut_short, strategy, where, on)
    assert [text for text, _, _ in results] == ["", ""]
    assert [step for _, _, step in results] == [STEPS, STEPS]
    check([state for _, state, _ in results if state is not None])


def one_behind(first: bool) -> tuple[dict[str, Tensor], list[str]]:
    """The gradients of a step are ready on rank 0 when rank 1 is stopped."""
    model, optimizer = start("tp=2")
    train(model, optimizer, 2)
    finish = gradients.finish

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    if World.current().rank == 1:
        gradients.finish = stop
        with pytest.raises(KeyboardInterrupt):
            cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
        gradients.finish = finish
    else:
        cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
    regroup()
    if first:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # without a gradient
    cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)  # without zero_grad: nothing was left
    optimizer.step()
    train(model, optimizer, STEPS - 3)
    return whole(model), list(World.current().notes)


@pytest.mark.parametrize("first", [False, True])
def test_gradients_that_some_ranks_have_are_dropped(ranks: Any, first: bool) -> None:
    results = ranks(2).run(one_behind, first)
    check([state for state, _ in results])
    assert "the weights of step 2 are whole on all ranks; gradients that some ranks had" in results[0][1][-1]


def cut_load(path: Path) -> str:
    """Stop meets rank 1 when load has given it the weights and is about to give it the optimizer's states."""
    model, optimizer = start("tp=2")
    train(model, optimizer, 2)
    cnb.save(path, model, optimizer)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if World.current().rank == 1:
            patch.setattr(fill, "_state", stop)
        else:
            patch.setattr(checkpoint, "go_on", stop)
        patch.setattr(checkpoint, "alike", lambda work, *_: work())  # no rank waits for the other
        with pytest.raises(KeyboardInterrupt):
            cnb.load(path, model, optimizer)
    regroup()
    with pytest.raises(ValueError, match="load was cut short on ranks 0 and 1"):
        model.state_dict()
    with pytest.raises(ValueError, match="torn") as caught:
        train(model, optimizer, 1)
    cnb.load(path, model, optimizer)
    train(model, optimizer, STEPS - 2)
    check([whole(model)])
    return str(caught.value)


def test_a_load_that_was_cut_short_is_found(ranks: Any, tmp_path: Path) -> None:
    for text in ranks(2).run(cut_load, tmp_path / "run"):
        assert "cnb.load was cut short on ranks 0 and 1" in text
        assert f"cnb.load('{tmp_path / 'run'}', model, optimizer)" in text


def meddled() -> str:
    """Somebody wrote into one replica's weights."""
    model, optimizer = start("dp=2")
    train(model, optimizer, 1)
    if World.current().rank == 1:
        with torch.no_grad():
            next(iter(model.parameters())).add_(1e-12)
    regroup()
    with pytest.raises(ValueError, match="torn") as caught:
        train(model, optimizer, 1)
    cnb.recover(model)
    train(model, optimizer, STEPS - 1)
    check([whole(model)])
    return str(caught.value)


def test_weights_are_compared_where_counters_see_nothing(ranks: Any) -> None:
    assert "torn: replicas of token.weight differ between ranks 0 and 1" in ranks(2).run(meddled)[0]
