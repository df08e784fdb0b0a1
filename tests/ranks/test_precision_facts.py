"""What stays fp32 and what does not, and what is skipped, under precision=bf16 and fp16."""

import copy
from typing import Any

import pytest
import torch
from mixed_gpt import INPUTS, TARGETS, made, same, step, whole
from small_gpt import loss_fn
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.models import GPT
from colossal_nb.parallel.handle import require
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks


# --- what is skipped


def overflowing(strategy: str, where: str, clip: bool) -> dict[str, Any]:
    """Gradients of one module overflow in fp16, on the ranks that hold it and in the last sample alone."""
    model, optimizer = made(strategy)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(model, optimizer)
    before, states = whole(model), copy.deepcopy([optimizer.state[p] for p in model.parameters()])
    row = INPUTS[-1:]

    def blow_up(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not output.requires_grad or not active or not (seen and seen[-1]):
            return output
        output.register_hook(lambda grad: grad * 1e6)
        return output

    seen: list[bool] = []
    active = [1]
    model.register_forward_pre_hook(lambda _, args: seen.append(bool((args[0][-1:] == row).all())))
    model.get_submodule(where).register_forward_hook(blow_up)
    optimizer.zero_grad()
    loss = cnb.forward_backward(model, loss_fn, INPUTS, TARGETS).item()
    if clip:
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    skipped = same(whole(model), before)
    kept = all(
        torch.equal(old[key], optimizer.state[p][key])
        for p, old in zip(model.parameters(), states, strict=True)
        for key in old
    )
    active.clear()
    scale = require(model).precision.scale.value
    step(model, optimizer)
    return {
        "loss": loss, "skipped": skipped, "kept": kept, "scale": scale, "goes on": not same(whole(model), before),
        "said": [note for note in World.current().notes if "fp16" in note], "lr": optimizer.param_groups[0]["lr"],
        "step": require(model).step,
    }  # fmt: skip


def test_every_rank_skips_what_overflows_on_one(ranks: Any) -> None:
    for count, strategy, where, clip in [
        (2, "dp=2", "blocks.1", False), (2, "pp=2", "blocks.0", False), (2, "pp=2", "blocks.1", True),
        (4, "dp=2 tp=2", "blocks.1.attention", False), (4, "dp=2 pp=2", "blocks.1", True),
    ]:  # fmt: skip
        found = ranks(count).run(overflowing, f"{strategy} precision=fp16", where, clip)
        for one in found:
            assert one == found[0]
            assert one["skipped"] and one["kept"] and one["goes on"]
            assert one["scale"] == 2.0**15
            assert 3 < one["loss"] < 4
            assert one["step"] == 3
            assert one["lr"] == 5e-4
            assert len(one["said"]) == 1
            assert "step 1 was skipped on all ranks" in one["said"][0]
            assert "65536 to 32768" in one["said"][0]


def closures() -> None:
    model, optimizer = made("precision=fp16")

    def closure() -> Tensor:
        optimizer.zero_grad()
        return cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)

    first = optimizer.step(closure)
    before = whole(model)
    head = model.head.register_forward_hook(lambda *_: _[2].register_hook(lambda grad: grad * 1e9) and None)
    optimizer.step(closure=closure)
    assert same(whole(model), before)
    assert not torch.isfinite(model.head.weight.grad).all()
    head.remove()
    assert optimizer.step(closure) < first


def test_a_closure_is_looked_at_after_it_ran(ranks: Any) -> None:
    ranks(1).run(closures)


# --- what is fp32


def plain_road() -> None:
    model, optimizer = made("dp=2 precision=fp16")
    cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
    expected = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    seen = []
    hook = model.head.weight.register_hook(lambda grad: seen.append(grad.dtype))
    output = model(INPUTS)
    assert output.dtype == torch.float32
    loss_fn(output, TARGETS).backward()
    hook.remove()
    assert seen == [torch.float32]
    for p, one in zip(model.parameters(), expected, strict=True):
        assert torch.nn.functional.cosine_similarity(p.grad.flatten(), one.flatten(), 0) > 0.99
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    average.update_parameters(model)
    step(model, optimizer)
    average.update_parameters(model)
    assert {p.dtype for p in average.parameters()} == {torch.float32}
    assert not any(torch.equal(a, b) for a, b in zip(average.module.parameters(), model.parameters(), strict=True))


def test_the_plain_road_and_averages_are_fp32(ranks: Any) -> None:
    ranks(2).run(plain_road)


def penalties(precision: str) -> None:
    model, optimizer = made(f"precision={precision}")
    kinds = set()

    def penalty(logits: Tensor, targets: Tensor) -> Tensor:
        kinds.add((logits.dtype, model.head.weight.dtype))
        return loss_fn(logits, targets) + 0.5 * model.head.weight.square().sum()

    cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
    plain = model.head.weight.grad.clone()
    optimizer.zero_grad()
    cnb.forward_backward(model, penalty, INPUTS, TARGETS)
    torch.testing.assert_close(model.head.weight.grad, plain + model.head.weight.detach())
    assert kinds == {(torch.float32, torch.float32)}


def test_a_penalty_in_the_loss_is_of_the_masters(ranks: Any) -> None:
    for precision in ("bf16", "fp16"):
        ranks(1).run(penalties, precision)


def accumulated(strategy: str) -> list[Tensor]:
    model, _ = made(strategy)
    with cnb.accumulate(model):
        cnb.forward_backward(model, loss_fn, INPUTS[:4], TARGETS[:4])
        cnb.forward_backward(model, loss_fn, INPUTS[4:], TARGETS[4:])
    return [cnb.full_grad(p) for p in model.parameters()]


def test_accumulation_adds_up_in_fp32(ranks: Any) -> None:
    (alone,) = ranks(1).run(accumulated, "precision=bf16")
    for found in ranks(2).run(accumulated, "dp=2 precision=bf16"):
        for one, other in zip(found, alone, strict=True):
            assert one.dtype == torch.float32
            assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), 0) > 0.999


class Own(nn.Module):
    """Computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = GPT(29, layers=2, hidden=16, heads=4, max_length=8)
        self.example_inputs = lambda: (INPUTS[:2], TARGETS[:2])

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(tokens)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def own_loss(strategy: str) -> float:
    torch.manual_seed(0)
    model: Any = Own()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    loss = cnb.forward_backward(model, None, (INPUTS, TARGETS))
    assert loss.dtype == torch.float32
    assert 1e-3 < nn.utils.clip_grad_norm_(model.parameters(), 1e9) < 10
    return float(loss)


def test_a_loss_inside_the_model_is_fp32(ranks: Any) -> None:
    (expected,) = ranks(1).run(own_loss, "dp=1")
    for strategy in ("dp=2 precision=bf16", "tp=2 precision=fp16", "pp=2 precision=fp16"):
        for found in ranks(2).run(own_loss, strategy):
            assert abs(found - expected) < 2e-3 * expected
