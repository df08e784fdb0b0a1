"""Stop at any moment of training: the next cell trains on as if the first had ended between two steps."""
from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import ALL, eventually
from small_gpt import INPUTS, TARGETS, gpt, loss_fn

from colossal_nb.run import Run
from colossal_nb.session import Session

LR = 1e-2
SETUP = f"""
import sys, time, torch, colossal_nb as cnb
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
""" + """
from small_gpt import INPUTS, TARGETS, gpt, loss_fn
model = gpt()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
slow = {"forward": 0, "backward": 0, "step": 0, "between": 0}
def wait(place): time.sleep(slow[place])
optimizer.register_step_post_hook(lambda *_: (wait("step"), print("stepped"), None)[2])
model, optimizer = cnb.parallelize(model, optimizer)
model.blocks[1].register_forward_pre_hook(lambda *_: wait("forward"))
def loss_of(logits, targets):
    logits.register_hook(lambda grad: wait("backward"))
    return loss_fn(logits, targets)
def steps_done():
    return max([0, *(int(entry["step"]) for entry in optimizer.state.values())])
def train(upto):
    while steps_done() < upto:
        optimizer.zero_grad()
        cnb.forward_backward(model, loss_of, INPUTS, TARGETS)
        wait("between")
        optimizer.step()
"""


def ok(session: Session, source: str, strategy: str | None = None) -> Run:
    run = session.run(source, strategy).wait()
    assert run.status == "ok", {rank: (error.ename, error.evalue) for rank, error in run.errors.items()}
    return run


def stopped(session: Session, source: str, after_s: float) -> Run:
    """Stop is pressed so long after rank 0 has ended its first step."""
    run = session.run(source)

    def press() -> None:
        eventually(lambda: "stepped" in run.text(0), 60)
        time.sleep(after_s)
        session.interrupt()

    timer = threading.Thread(target=press)
    timer.start()
    run.wait()
    timer.join()
    assert run.status == "interrupted"
    assert {rank: error.ename for rank, error in run.errors.items()} == dict.fromkeys(ALL, "KeyboardInterrupt")
    return run


def check(session: Session) -> None:
    """A few more steps; the weights are those of as many steps on one device."""
    ok(session, "slow = dict.fromkeys(slow, 0)\ntrain(steps_done() + 2)")
    ok(session, "done, state = steps_done(), model.state_dict()")
    counts = [session.pull("done", rank) for rank in ALL]
    assert len(set(counts)) == 1
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for _ in range(counts[0]):
        optimizer.zero_grad()
        loss_fn(model(INPUTS), TARGETS).backward()
        optimizer.step()
    for state in [session.pull("state", rank) for rank in ALL]:
        for name, value in model.state_dict().items():
            floor = max(value.abs().max().item(), LR * counts[0])    # rule L
            assert (state[name] - value).abs().max().item() <= 1e-10 * floor


@pytest.mark.parametrize("strategy", ["dp=2 tp=2", "dp=2 pp=2 microbatches=2"])
def test_a_stop_at_any_moment_leaves_whole_weights(session: Session, strategy: str) -> None:
    ok(session, SETUP, strategy)
    chance = random.Random(0)
    for place in ("forward", "backward", "between", "step", ""):
        ok(session, f"slow = dict.fromkeys(slow, 0.002 * rank)\nslow['{place}'] = 0.02 + 0.02 * rank")
        run = stopped(session, "train(10**6)", chance.random() / 4)
        assert any("are whole on all ranks" in note for note in run.notes), run.notes
    check(session)


def test_a_stop_behind_the_update_leaves_whole_weights(session: Session) -> None:
    ok(session, SETUP, "dp=2 tp=2")
    stopped(session, "train(1)\nslow['step'] = 100\ntrain(2)", 0.1)
    check(session)


def test_an_error_between_the_ranks_steps_is_told_by_every_use(session: Session) -> None:
    ok(session, SETUP, "dp=2 tp=2")
    ok(session, "train(2)")
    run = session.run("optimizer.zero_grad()\ncnb.forward_backward(model, loss_of, INPUTS, TARGETS)\n"
                      "assert rank != 1\noptimizer.step()").wait()
    assert run.status == "error"
    for use in ("optimizer.step()", "if rank != 1: model.state_dict()", "cnb.full(next(model.parameters()))"):
        run = session.run(use).wait()
        assert run.errors and all("torn: " in error.evalue for error in run.errors.values()), run.errors
    ok(session, "cnb.recover(model)")
    check(session)


def test_a_stop_that_cannot_wait_is_told_with_the_next_use(session: Session) -> None:
    ok(session, SETUP, "dp=2 tp=2")
    ok(session, "train(1)\nslow['between'] = 100 * (rank == 3)")
    stopped(session, "train(10**6)", 0.1)
    run = session.run("slow['between'] = 0\ntrain(9)").wait()
    assert {error.ename for error in run.errors.values()} == {"ValueError"}
    assert "torn: a step ended on some ranks only" in run.errors[0].evalue
    assert "cnb.recover(model)" in run.errors[0].evalue
    assert run.errors[0].evalue == run.errors[3].evalue
    run = ok(session, "cnb.recover(model)")
    said = "the weights of step 2 are whole on all ranks again; gradients were dropped. Variables of the cells"
    assert any(note.startswith(said) for note in run.notes)
    check(session)


def test_an_error_inside_the_loss_on_one_rank(session: Session) -> None:
    ok(session, SETUP, "dp=2 tp=2")
    ok(session, "train(2)")
    run = session.run("def broken(logits, targets):\n    assert rank != 1, 'mine'\n"
                      "    return loss_fn(logits, targets)\n"
                      "optimizer.zero_grad()\ncnb.forward_backward(model, broken, INPUTS, TARGETS)").wait()
    assert "mine" in run.errors[1].evalue
    assert run.error is not None and run.error.rank == 1
    run = ok(session, "train(3)")
    assert "the weights of step 2 are whole on all ranks" in run.notes
    check(session)
