"""A rank that was replaced or is new: its functions see its own names, nothing of a parallel model comes to it."""
from __future__ import annotations

import os
import signal

import pytest
from conftest import eventually, printed

from colossal_nb.run import Run
from colossal_nb.session import Session

TRAIN = """import torch, colossal_nb as cnb
torch.manual_seed(0)
model = cnb.models.MLP(features=8, hidden=16, classes=4, layers=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 8), torch.arange(8) % 4
model, optimizer = cnb.parallelize(model, optimizer)
def train(n):
    for _ in range(n):
        optimizer.zero_grad()
        loss = cnb.forward_backward(model, torch.nn.functional.cross_entropy, x, y)
        optimizer.step()
        print(f"{loss.item():.4f}")
train(2)
"""
USES = ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "train(1)", "with torch.no_grad(): model(x)",
        "model.state_dict()", "cnb.full(next(iter(model.parameters())))",
        "cnb.redistribute(model, optimizer, 'dp=2 tp=2')")
LOST = "this model lost rank {}'s part: run the cell that makes it again"


def ok(session: Session, source: str, strategy: str | None = None) -> Run:
    run = session.run(source, strategy).wait()
    assert run.status == "ok", {rank: (error.ename, error.evalue) for rank, error in run.errors.items()}
    return run


def lose(session: Session, rank: int, how: str) -> None:
    """Replace a rank as a user does, or as an accident does."""
    if how == "restart":
        session.restart(rank)
        return
    pid = session.status().members[rank][1]
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: session.status().members[rank][1:] != (pid, "ready"))


@pytest.mark.parametrize(("strategy", "rank", "how"), [
    ("tp=2 pp=2 microbatches=4", 0, "kill"), ("tp=4", 0, "restart"), ("tp=4", 3, "kill"), ("dp=4", 1, "restart"),
    ("pp=4", 2, "restart")])
def test_a_model_that_lost_a_rank_ends_every_use_with_one_sentence(
        session: Session, strategy: str, rank: int, how: str) -> None:
    before = ok(session, TRAIN, strategy)
    lose(session, rank, how)
    for use in USES:
        run = session.run(use, timeout_s=30).wait()
        said = {each: (error.ename, error.evalue) for each, error in run.errors.items()}
        name, text = said.pop(rank)
        assert name == "NameError" and f"is not on rank {rank}, which was replaced (" in text, text
        assert "is parallel): run the cell that makes" in text
        assert said == {each: ("ValueError", LOST.format(rank)) for each in range(4) if each != rank}, use
    assert printed(ok(session, TRAIN, strategy)) == printed(before)


def test_functions_of_cells_use_the_names_of_the_rank_that_they_are_copied_to(session: Session) -> None:
    ok(session, "import torch\nw = torch.ones(3) * rank\ndef f(): return w.sum().item()\ng = lambda: f() + _one\n"
                "_one = 1\nclass Thing:\n    def total(self): return f()\n    twice = staticmethod(lambda: 2 * f())\n"
                "def made(bonus):\n    def inner(): return f() + bonus\n    return inner\nh = made(5)\n"
                "held = {'f': [f, Thing().total]}\nthing = Thing()")
    session.restart(1)
    run = ok(session, "w = torch.ones(3) * 100\nprint(f(), g(), thing.total(), Thing.twice(), h(), held['f'][0](), "
                      "held['f'][1](), f.__globals__ is globals(), h.__globals__ is globals(), rank, "
                      "__builtins__.len is len)")
    assert printed(run) == [f"300.0 301.0 300.0 600.0 305.0 300.0 300.0 True True {rank} True" for rank in range(4)]
    assert printed(ok(session, "_one = 0\nprint(g())")) == ["300.0"] * 4


def test_nothing_that_holds_a_part_of_a_model_is_copied_however_deep(session: Session) -> None:
    ok(session, TRAIN + """
import dataclasses, functools
@dataclasses.dataclass
class State:
    inside: object
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
in_list, in_dict, in_class = [1, [model]], {'a': {'b': optimizer}}, State(State(model))
bound, partial, layer = model.state_dict, functools.partial(print, optimizer), [*model.children()][0]
def closed(held):
    def inner(): return held
    return inner
closure, parameter = closed(model), [*model.parameters()][0]
part, gradient = parameter.detach()[:1], parameter.grad
def default(held=model): return held
harmless, own = {'x': x, 'f': train}, torch.nn.Linear(2, 2)
""", "tp=4")
    note = session.restart(2)[0]
    wrong = ["model", "optimizer", "scheduler", "in_list", "in_dict", "in_class", "bound", "partial", "layer",
             "closure", "parameter", "part", "gradient", "default"]
    for name in wrong:
        assert f"{name} (is parallel)" in note or f"{name} (holds something parallel)" in note, (name, note)
    run = ok(session, f"print([name for name in {wrong} if name in globals()], sorted(harmless), own.weight.shape)")
    assert printed(run)[2] == "[] ['f', 'x'] torch.Size([2, 2])"


def test_a_model_that_is_cut_at_its_first_batch_is_parallel_before(session: Session) -> None:
    ok(session, "import torch, colossal_nb as cnb\nclass Odd(torch.nn.Module):\n    def __init__(self):\n"
                "        super().__init__()\n        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)\n"
                "    def forward(self, x, scale): return self.b(torch.relu(self.a(x))) * scale\n"
                "m = Odd()\no = torch.optim.SGD(m.parameters(), lr=0.1)\nm, o = cnb.parallelize(m, o)\n"
                "weight = m.a.weight", "tp=4")
    note = session.restart(1)[0]
    assert all(f"{name} (" in note for name in ("m", "o", "weight")), note


def test_what_is_missing_is_computed_over_all_ranks_and_the_fullest_rank_is_copied(session: Session) -> None:
    ok(session, TRAIN + "stream = (i for i in range(3))\nplain = 7\nif rank == 3: alone = 1", "tp=4")
    session.restart(0)
    note = session.restart(1)[0]
    assert "with copies of rank 3's names" in note
    assert "model (is parallel)" in note and "stream (cannot be copied" in note
    session.run("del globals()['plain']", ranks=[3]).wait()
    session.restart(3)
    note = session.restart(2)[0]
    assert "alone" not in note
    assert printed(ok(session, "print(plain)")) == ["7"] * 4


def test_what_cannot_be_read_on_a_new_rank_is_named_and_all_else_arrives(session: Session) -> None:
    # A handle of a hook finds its module's hooks by a weak reference, and writes itself without them.
    ok(session, "import torch\nlayer = torch.nn.Linear(2, 2)\nhandle = layer.register_forward_hook(print)\n"
                "layer = None\na = torch.ones(3)\nb = [a]\nstream = (i for i in range(3))")
    note = session.restart(1)[0]
    assert "with copies of rank 0's names; not there: " in note, note
    assert "handle (cannot be copied (TypeError))" in note and "stream (cannot be copied" in note
    run = ok(session, "print(b[0] is a, 'handle' in globals(), 'layer' in globals())")
    assert printed(run) == [f"True {rank != 1} True" for rank in range(4)]
    run = session.run("handle.remove()").wait()
    assert set(run.errors) == {1} and "handle is not on rank 1, which was replaced" in run.errors[1].evalue


def test_the_loss_of_all_ranks_is_told(session: Session) -> None:
    ok(session, "kept = 1")
    pids = {pid for _, pid, _ in session.status().members}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not {pid for _, pid, _ in session.status().members} & pids)
    run = session.run("print('kept' in globals())").wait()
    assert printed(run) == ["False"] * 4
    assert any("all ranks are new and empty" in note for note in run.notes), run.notes
    assert {death.rank for death in session.status().deaths[-4:]} == {0, 1, 2, 3}
