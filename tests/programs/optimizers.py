"""Several optimizers, parameter groups, closures, state that is saved and loaded while training."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from programs import LR, Lab, Program, adamw, train


def two_optimizers(cnb: Any, lab: Lab) -> nn.Module:
    """Made before parallelize; each is given to it."""
    model = lab.model()
    first = torch.optim.AdamW(model.blocks.parameters(), lr=LR)
    rest = [p for name, p in model.named_parameters() if not name.startswith("blocks")]
    second = torch.optim.SGD(rest, lr=0.05, momentum=0.9)
    model, first = cnb.parallelize(model, first)
    model, second = cnb.parallelize(model, second)
    for inputs, targets in lab.batches():
        first.zero_grad()
        second.zero_grad()
        lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        first.step()
        second.step()
    return model


def optimizer_made_afterwards(cnb: Any, lab: Lab) -> nn.Module:
    """Nobody gives it to parallelize."""
    model = cnb.parallelize(lab.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    train(cnb, lab, model, optimizer)
    return model


def state_from_before(cnb: Any, lab: Lab) -> nn.Module:
    """Two optimizers that have trained already on one device."""
    model = lab.model()
    blocks = list(model.blocks.parameters())
    own = {id(p) for p in blocks}
    optimizers = [
        torch.optim.AdamW(blocks, lr=LR),
        torch.optim.SGD([p for p in model.parameters() if id(p) not in own], lr=0.05, momentum=0.9),
    ]
    for step, (inputs, targets) in enumerate(lab.batches(4)):
        if step == 2:
            for optimizer in optimizers:
                model, _ = cnb.parallelize(model, optimizer)
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step < 2:
            loss = lab.loss_fn(model(inputs), targets)
            loss.backward()
        else:
            loss = cnb.forward_backward(model, lab.loss_fn, inputs, targets)
        lab.show("loss", loss)
        for optimizer in optimizers:
            optimizer.step()
    return model


def weight_decay_groups(cnb: Any, lab: Lab) -> nn.Module:
    """No decay for what has one dim, another learning rate for the head."""
    model = lab.model()
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if p.dim() > 1 and "head" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in named if p.dim() == 1 and "head" not in n], "weight_decay": 0.0},
            {"params": [p for n, p in named if "head" in n], "lr": 10 * LR},
        ],
        lr=LR,
    )
    model, optimizer = cnb.parallelize(model, optimizer)
    train(cnb, lab, model, optimizer)
    lab.show("groups", [len(group["params"]) for group in optimizer.param_groups])
    return model


def groups_made_afterwards(cnb: Any, lab: Lab) -> nn.Module:
    """Dims are those of the whole parameters, on every rank."""
    model = cnb.parallelize(lab.model())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    train(cnb, lab, model, optimizer)
    return model


def group_added_later(cnb: Any, lab: Lab) -> nn.Module:
    """First the head, then the blocks too."""
    model = lab.model()
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=LR)
    model, optimizer = cnb.parallelize(model, optimizer)
    train(cnb, lab, model, optimizer, 2)
    optimizer.add_param_group({"params": list(model.blocks.parameters()), "lr": LR / 2})
    model.zero_grad()
    train(cnb, lab, model, optimizer, 2, seed=8)
    return model


def closure(cnb: Any, lab: Lab) -> nn.Module:
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    for inputs, targets in lab.batches():

        def again(inputs: Any = inputs, targets: Any = targets) -> Any:
            optimizer.zero_grad()
            return cnb.forward_backward(model, lab.loss_fn, inputs, targets)

        lab.show("loss", optimizer.step(again))
    return model


def state_goes_back(cnb: Any, lab: Lab) -> nn.Module:
    """Model and optimizer go back to where they were, in memory."""
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer, 2)
    kept = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(cnb, lab, model, optimizer, 2, seed=8)
    optimizer.load_state_dict(kept[0])
    model.load_state_dict(kept[1])
    train(cnb, lab, model, optimizer, 2, seed=9)
    return model


def state_into_a_new_optimizer(cnb: Any, lab: Lab) -> nn.Module:
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer, 2)
    fresh = adamw(model, lr=0.5)
    fresh.load_state_dict(optimizer.state_dict())
    lab.show("lr", fresh.param_groups[0]["lr"])
    train(cnb, lab, model, fresh, 2, seed=8)
    return model


def learning_rate_by_hand(cnb: Any, lab: Lab) -> nn.Module:
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model, fused=True))
    train(cnb, lab, model, optimizer, 1)
    for group in optimizer.param_groups:
        group["lr"] *= 0.1
    train(cnb, lab, model, optimizer, 2, seed=8)
    return model


def descent_by_hand(cnb: Any, lab: Lab) -> nn.Module:
    """No optimizer at all."""
    model = cnb.parallelize(lab.model())
    for inputs, targets in lab.batches():
        model.zero_grad()
        lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
    return model


def optimizer_per_parameter(cnb: Any, lab: Lab) -> nn.Module:
    """Each weight is updated as soon as its gradient is there, and the gradient let go."""
    model = cnb.parallelize(lab.model())
    optimizers = {p: torch.optim.AdamW([p], lr=LR) for p in model.parameters()}

    def update(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for inputs, targets in lab.batches():
        lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
    return model


def of_whole_matrices(cnb: Any, lab: Lab) -> nn.Module:
    """Optimizers that look at a matrix as a whole, given as a list."""
    model = lab.model()
    model, optimizers = cnb.parallelize(model, _of_whole_matrices(model))
    return _stepped_together(cnb, lab, model, optimizers)


def of_whole_matrices_made_afterwards(cnb: Any, lab: Lab) -> nn.Module:
    """Nobody gives them to parallelize."""
    model = cnb.parallelize(lab.model())
    return _stepped_together(cnb, lab, model, _of_whole_matrices(model))


def _of_whole_matrices(model: nn.Module) -> list[Any]:
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [torch.optim.Muon(matrices, lr=LR), torch.optim.Adafactor(rest, lr=LR, eps=(1e-5, 1e-3))]


def _stepped_together(cnb: Any, lab: Lab, model: nn.Module, optimizers: list[Any]) -> nn.Module:
    for inputs, targets in lab.batches():
        for each in optimizers:
            each.zero_grad()
        lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        for each in optimizers:
            each.step()
    return model


def line_search(cnb: Any, lab: Lab) -> nn.Module:
    """Its closure is called as often as the losses ask for."""
    model = lab.model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    model, optimizer = cnb.parallelize(model, optimizer)
    for inputs, targets in lab.batches(2):

        def again(inputs: Any = inputs, targets: Any = targets) -> Any:
            optimizer.zero_grad()
            return cnb.forward_backward(model, lab.loss_fn, inputs, targets)

        lab.show("loss", optimizer.step(again))
    return model


PROGRAMS: list[Program] = [
    two_optimizers, optimizer_made_afterwards, state_from_before, weight_decay_groups, groups_made_afterwards,
    group_added_later, closure, state_goes_back, state_into_a_new_optimizer, learning_rate_by_hand, descent_by_hand,
    optimizer_per_parameter, of_whole_matrices, of_whole_matrices_made_afterwards, line_search,
]  # fmt: skip
