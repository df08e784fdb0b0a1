"""Losses inside and outside the model, outputs, loops by hand, data loaders, seeds, changed weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.init import eye_, orthogonal_, sparse_, xavier_normal_
from torch.utils.data import DataLoader, TensorDataset

from programs import LR, VOCABULARY, Lab, Program, adamw, linears, text_loss, train


def _with_loss(cnb: Any, lab: Lab, loss_fn: Any) -> nn.Module:
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    for inputs, targets in lab.batches():
        optimizer.zero_grad()
        lab.show("loss", cnb.forward_backward(model, loss_fn, inputs, targets))
        optimizer.step()
    return model


class Focal(nn.Module):
    """A loss of one's own, with a buffer: the weights of classes by how well each token is known already."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gamma", torch.tensor(2.0))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        logs = functional.log_softmax(output, -1)
        known = targets != -100
        mine = logs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (-((1 - mine.exp()) ** self.gamma) * mine * known).sum() / known.sum()


def focal_loss(cnb: Any, lab: Lab) -> nn.Module:
    return _with_loss(cnb, lab, Focal())


def label_smoothing(cnb: Any, lab: Lab) -> nn.Module:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    return _with_loss(cnb, lab, lambda out, t: criterion(out.flatten(0, -2), t.flatten()))


def classes_first(cnb: Any, lab: Lab) -> nn.Module:
    """The other shape that cross entropy takes."""
    return _with_loss(cnb, lab, lambda out, t: functional.cross_entropy(out.movedim(-1, 1), t))


def sum_and_count(cnb: Any, lab: Lab) -> nn.Module:
    """What sequential programs do by hand is the pair here."""

    def pair(output: Tensor, targets: Tensor) -> Any:
        total = functional.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum")
        count = (targets != -100).sum()
        return total / count if cnb.__class__.__name__ == "Plain" else (total, count)

    return _with_loss(cnb, lab, pair)


class WithLoss:
    """Takes labels and returns its loss, as models of libraries do."""

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = super().forward(inputs)
        return {"logits": logits} if labels is None else {"loss": text_loss(logits, labels), "logits": logits}

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        inputs = super().example_inputs()[0]
        with torch.no_grad():
            return inputs, super().forward(inputs).argmax(-1)


def loss_inside(cnb: Any, lab: Lab) -> nn.Module:
    model = lab.model(lab.extended(WithLoss))
    model, optimizer = cnb.parallelize(model, adamw(model))
    for inputs, targets in lab.batches():
        optimizer.zero_grad()
        lab.show("loss", cnb.forward_backward(model, None, {"inputs": inputs, "labels": targets}))
        optimizer.step()
    inputs, targets = lab.batches(1, 3)[0]
    with torch.no_grad():
        lab.show("logits", model(inputs=inputs)["logits"])
        lab.show("evaluated", model(inputs, labels=targets)["loss"])
    return model


def outputs_returned(cnb: Any, lab: Lab) -> nn.Module:
    """Accuracy of the batch that was trained on."""
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    for samples in (6, 3, 1):
        inputs, targets = lab.batches(1, samples, seed=samples)[0]
        optimizer.zero_grad()
        loss, output = cnb.forward_backward(model, lab.loss_fn, inputs, targets, return_output=True)
        optimizer.step()
        lab.show("loss", loss)
        lab.show("output", output)
        lab.show("right", (output.argmax(-1) == targets).sum().item())
    return model


def loop_by_hand(cnb: Any, lab: Lab) -> nn.Module:
    """loss.backward() in the user's hands."""
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    for samples in (6, 3, 1):
        inputs, targets = lab.batches(1, samples, seed=samples)[0]
        optimizer.zero_grad()
        loss = lab.loss_fn(model(inputs), targets)
        loss.backward()
        lab.show("loss", loss)
        lab.show("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return model


def data_loader(cnb: Any, lab: Lab) -> nn.Module:
    """Shuffled by torch's own random state; two epochs, the last batch is a single sample."""
    model = lab.model()
    inputs, targets = lab.batches(1, 7)[0]
    torch.manual_seed(11)
    model, optimizer = cnb.parallelize(model, adamw(model))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=3, shuffle=True)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            lab.show("loss", cnb.forward_backward(model, lab.loss_fn, x, y))
            optimizer.step()
    return model


def seeds(cnb: Any, lab: Lab) -> nn.Module:
    """Noise and orders drawn between steps, from a state that training leaves alone; seeded again on the way."""
    model = lab.model()
    torch.manual_seed(5)
    model, optimizer = cnb.parallelize(model, adamw(model))
    for step, (inputs, targets) in enumerate(lab.batches(3)):
        if step == 2:
            torch.manual_seed(6)
        order = torch.randperm(len(inputs))
        lab.show("order", order.tolist())
        optimizer.zero_grad()
        lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs[order], targets[order]))
        optimizer.step()
        with torch.no_grad():
            model(inputs)
        lab.show("random", torch.rand(3))
    return model


def autocast_is_closed(cnb: Any, lab: Lab) -> nn.Module:
    """A loop under autocast that is switched off."""
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    for inputs, targets in lab.batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        optimizer.step()
    return model


def loaded_on_the_way(cnb: Any, lab: Lab) -> nn.Module:
    """Weights of another model, all of them and some of them, come in while it trains."""
    model = lab.model()
    other = {name: value * 1.1 for name, value in model.state_dict().items()}
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer, 1)
    model.load_state_dict(other)
    train(cnb, lab, model, optimizer, 1, seed=8)
    part = {name: value for name, value in other.items() if name.startswith("blocks.1")}
    answer = model.load_state_dict(part, strict=False)
    lab.show("missing", answer.missing_keys)
    train(cnb, lab, model, optimizer, 1, seed=9)
    return model


def weights_changed_by_hand(cnb: Any, lab: Lab) -> nn.Module:
    """Clamped, decayed, set to constants after parallelize."""
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    for seed in range(2):
        train(cnb, lab, model, optimizer, 1, seed=seed)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99).clamp_(-0.5, 0.5)
    *_, last = [p for p in model.blocks[1].parameters() if p.dim() == 1]
    nn.init.zeros_(last)
    nn.init.constant_(next(p for p in model.blocks[0].parameters() if p.dim() == 1), 0.7)
    model.norm.weight.data.fill_(1.2)
    train(cnb, lab, model, optimizer, 1, seed=8)
    return model


def weights_drawn_again(cnb: Any, lab: Lab) -> nn.Module:
    """model.apply(initialize) and single calls of nn.init after parallelize."""

    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)

    model = cnb.parallelize(lab.model())
    torch.manual_seed(21)
    model.apply(initialize)
    first, second = (list(linears(block).values()) for block in model.blocks)
    nn.init.trunc_normal_(first[-2].weight, std=0.05)
    nn.init.orthogonal_(second[-3].weight)
    nn.init.kaiming_normal_(second[-1].weight)
    xavier_normal_(first[-1].weight)
    with torch.no_grad():
        second[-2].weight.normal_(0, 0.1)
    lab.show("random", torch.rand(2))
    train(cnb, lab, model, adamw(model))
    return model


def weights_drawn_by_name(cnb: Any, lab: Lab) -> nn.Module:
    """By functions that were imported by name, of those that draw another tensor first, or none."""
    model = cnb.parallelize(lab.model())
    torch.manual_seed(24)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    orthogonal_(matrices[0], gain=0.5)
    sparse_(matrices[-1], sparsity=0.3, std=0.1)
    eye_(matrices[1])
    train(cnb, lab, model, adamw(model))
    return model


def parameters_reset(cnb: Any, lab: Lab) -> nn.Module:
    """The modules draw their own weights again."""
    model = cnb.parallelize(lab.model())
    torch.manual_seed(22)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    train(cnb, lab, model, adamw(model))
    return model


def embedding_reset(cnb: Any, lab: Lab) -> nn.Module:
    """With a row for padding, which stays 0."""
    model = lab.model()
    model.token.padding_idx = VOCABULARY - 2
    model = cnb.parallelize(model)
    torch.manual_seed(23)
    model.token.reset_parameters()
    lab.show("row of padding", cnb.full(model.token.weight)[-2])
    train(cnb, lab, model, adamw(model))
    return model


class Tempered(nn.Module):
    """A loss with a parameter of its own, which is trained too."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return text_loss(output / self.temperature, targets)


def trained_loss(cnb: Any, lab: Lab) -> nn.Module:
    """Its parameter is no part of the model; an optimizer of its own updates it."""
    model, criterion = lab.model(), Tempered()
    own = torch.optim.SGD(criterion.parameters(), lr=0.1)
    model, optimizer = cnb.parallelize(model, adamw(model))
    for inputs, targets in lab.batches():
        optimizer.zero_grad()
        own.zero_grad()
        lab.show("loss", cnb.forward_backward(model, criterion, inputs, targets))
        optimizer.step()
        own.step()
        lab.show("temperature", criterion.temperature)
    return model


def trained_in_a_lambda(cnb: Any, lab: Lab) -> nn.Module:
    """A scale that the loss finds around it; the model's optimizer holds it too. Clipped together, accumulated."""
    model, scale = lab.model(), nn.Parameter(torch.tensor(0.7, dtype=lab.dtype))
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": [scale], "weight_decay": 0.0}], lr=LR)
    model, optimizer = cnb.parallelize(model, optimizer)
    for samples in (6, 3, 1):
        optimizer.zero_grad()
        with cnb.accumulate(model):
            for inputs, targets in lab.batches(2, samples, seed=samples):
                loss_fn = lambda out, t: text_loss(out * scale.exp(), t) + 0.1 * scale**2  # noqa: E731
                lab.show("loss", cnb.forward_backward(model, loss_fn, inputs, targets))
        lab.show("gradient", scale.grad)
        lab.show("norm", nn.utils.clip_grad_norm_([scale, *model.parameters()], 0.1))
        optimizer.step()
        lab.show("scale", scale)
    return model


def trained_by_hand(cnb: Any, lab: Lab) -> nn.Module:
    """The same in a loop by hand, where the loss is that of the whole batch on every rank."""
    model, criterion = lab.model(), Tempered()
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=LR)
    model, optimizer = cnb.parallelize(model, optimizer)
    for inputs, targets in lab.batches():
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        lab.show("gradient", criterion.temperature.grad)
        optimizer.step()
        lab.show("temperature", criterion.temperature)
    return model


PROGRAMS: list[Program] = [
    focal_loss, label_smoothing, classes_first, sum_and_count, loss_inside, outputs_returned, loop_by_hand,
    data_loader, seeds, autocast_is_closed, loaded_on_the_way,
    weights_changed_by_hand, weights_drawn_again, weights_drawn_by_name, parameters_reset, embedding_reset,
    trained_loss, trained_in_a_lambda, trained_by_hand,
]  # fmt: skip
ONLY: dict[Program, str] = {embedding_reset: "gpt llama bert"}
