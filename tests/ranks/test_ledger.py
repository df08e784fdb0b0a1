"""The ledger: each byte once, in one category, as long as it is alive."""

import gc

import pytest
import torch
from recorded import record_of
from torch import nn
from torch.nn import functional as F

from colossal_nb.parallel.ledger import Ledger, Memory, OutOfDeviceMemory
from colossal_nb.record.recorder import Recorder


@pytest.fixture
def ledger():
    return Ledger(3, Recorder(3))


def _written(ledger):
    return record_of(ledger.recorder.drain()).memory


def test_a_storage_counts_once_whatever_views_it_and_leaves_when_freed(ledger):
    x = torch.zeros(10, 10)
    ledger.track(x, "parameter", "x")
    ledger.track(x.t(), "parameter", "x again")
    ledger.track(x[3:], "parameter", "a part")
    assert ledger.totals() == Memory(parameter=400)
    view = x.view(-1)
    del x
    assert ledger.totals() == Memory(parameter=400)
    del view
    assert ledger.totals() == Memory()
    assert ledger.peak_bytes() == 400


def test_a_tensor_can_change_its_category_and_its_place(ledger):
    x = torch.zeros(8)
    ledger.track(x, "activation", "x")
    ledger.track(x, "optimizer", "x")
    assert ledger.totals() == Memory(optimizer=32)
    ledger.track(x, "optimizer", "x", where="host")
    assert ledger.totals() == Memory()
    assert ledger.totals("host") == Memory(optimizer=32)


def test_a_storage_that_grew_is_counted_anew(ledger):
    x = torch.zeros(4)
    ledger.track(x, "buffer", "x")
    x.resize_(100)
    ledger.track(x, "buffer", "x")
    assert ledger.totals() == Memory(buffer=400)


class _Net(nn.Module):
    """first: 6 -> 8, second: 8 -> 4; in between a gelu."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def test_one_step_by_hand(ledger):
    model = _Net()
    optimizer = torch.optim.AdamW(model.parameters())
    ledger.watch(model, optimizer)
    # Parameters: (6*8 + 8) + (8*4 + 4) = 92 numbers.
    assert ledger.totals() == Memory(parameter=92 * 4, buffer=12)
    x = torch.randn(5, 6)
    with ledger.activations():
        out = model(x)
        loss = out.square().sum()
    # Saved: x (5*6), the gelu's input (5*8) and output, which `second` saves (5*8), the square's input (5*4).
    expected = (30 + 40 + 40 + 20) * 4
    assert ledger.totals() == Memory(parameter=92 * 4, buffer=12, activation=expected)
    names = {held.name for held in ledger.held() if held.category == "activation"}
    assert names == {"first [5, 6]", "_Net [5, 8]", "second [5, 8]", "outside modules [5, 4]"}
    loss.backward()
    del out, loss, x
    assert ledger.totals() == Memory(parameter=92 * 4, buffer=12, gradient=92 * 4)
    optimizer.step()
    ledger.watch_states(optimizer, model)
    # Adam: two numbers per parameter, and one step counter of 4 bytes for each of the 4 parameters.
    assert ledger.totals().optimizer == 2 * 92 * 4 + 4 * 4
    optimizer.zero_grad()
    assert ledger.totals().gradient == 0
    del model, optimizer
    gc.collect()
    assert ledger.totals() == Memory()


def test_replaced_parameters_are_counted_after_watching_again(ledger):
    model = nn.Linear(6, 8)
    ledger.watch(model)
    model.weight.data = model.weight.data[:4].clone()
    assert ledger.totals() == Memory(parameter=8 * 4)
    ledger.watch(model)
    ledger.watch(model)
    assert ledger.totals() == Memory(parameter=(24 + 8) * 4)
    assert len(model.weight._post_accumulate_grad_hooks) == 1


def test_the_tensor_that_passes_the_capacity_is_named():
    model = _Net()
    ledger = Ledger(2, Recorder(2), capacity_bytes=2 * 92 * 4)
    ledger.watch(model)
    with pytest.raises(OutOfDeviceMemory) as caught, ledger.activations():
        model(torch.randn(5, 6)).sum()
    error = caught.value
    assert (error.rank, error.category, error.name) == (2, "activation", "second [5, 8]")
    assert error.used_bytes + error.size_bytes > error.capacity_bytes == 736
    assert "rank 2 is out of device memory: activation second [5, 8]" in str(error)
    del error, caught  # their frames hold what the forward had saved
    gc.collect()
    assert ledger.totals() == Memory(parameter=92 * 4, buffer=12)
    ledger.capacity_bytes = None
    with ledger.activations():
        model(torch.randn(5, 6)).sum().backward()


def test_samples_are_few_complete_and_include_the_peak(ledger):
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(30)))
    ledger.watch(model)
    _written(ledger)
    for _ in range(3):
        with ledger.activations():
            out = model(torch.randn(64, 32))
        ledger.sample()
        out.sum().backward()
        ledger.sample()
        del out
    rows = _written(ledger)
    totals = [sum(row[category] for category in Memory().by_category()) for row in rows]
    assert max(totals) * 1.01 >= ledger.peak_bytes()
    assert len(rows) < 200
    assert {(row["rank"], row["where"], row["basis"]) for row in rows} == {(3, "device", "hooks")}
    assert rows[-1]["gradient"] == 30 * (32 * 32 + 32) * 4
    assert rows[-1]["activation"] == 0


def test_an_error_in_the_forward_leaves_no_hook_behind(ledger):
    model = _Net()
    ledger.watch(model)
    with pytest.raises(RuntimeError), ledger.activations():
        model(torch.randn(5, 7))
    out = model(torch.randn(5, 6))
    assert ledger.totals().activation == 0
    del out
    with ledger.activations():
        alive = model.second(torch.randn(5, 8))
    assert [held.name for held in ledger.held() if held.category == "activation"] == ["second [5, 8]"]
    assert alive.requires_grad
