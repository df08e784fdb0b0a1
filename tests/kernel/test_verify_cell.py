"""`%%colossal --verify`: the verdict under the cell, or its error."""
from __future__ import annotations

from conftest import Notebook

SETUP = """%%colossal
import torch, colossal_nb as cnb
from colossal_nb.models import GPT
from colossal_nb.parallel import gradients
right = gradients.finish
tokens = torch.arange(32).reshape(4, 8) % 16
def loss_fn(logits, targets): return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
def train(by=lambda model: None):
    torch.manual_seed(0)
    model = GPT(vocab_size=16, layers=2, hidden=16, heads=2)
    model, optimizer = cnb.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):
        optimizer.zero_grad()
        loss = cnb.forward_backward(model, loss_fn, tokens, tokens)
        by(model)
        optimizer.step()
        print(f"{loss.item():.4f}")
"""


def test_a_right_cell_says_so_in_one_line_and_trains_as_without(notebook: Notebook) -> None:
    notebook.ok(SETUP)
    plain = notebook.ok("%%colossal tp=2 dp=2\ntrain()")
    verified = notebook.ok("%%colossal tp=2 dp=2 --verify\ntrain()")
    assert plain.stream() == verified.stream() != ""
    said = "verified: dp=2 tp=2 equals the sequential program over 3 steps of forward_backward with AdamW"
    assert said in verified.said
    assert "the rest of the cell, your own loop, is not compared" in verified.said
    assert "verified" not in plain.said
    assert notebook.value("cnb.last_run.summary.steps") == "2"
    assert "verified" not in notebook.ok("%%colossal tp=2 dp=2\ntrain()").said


def test_a_wrong_one_ends_with_the_table(notebook: Notebook) -> None:
    notebook.ok("%%colossal\ngradients.finish = lambda parallel, active, count: right(parallel, active, count / 2)")
    reply = notebook.run("%%colossal dp=2 --verify\ntrain()")
    notebook.ok("%%colossal\ngradients.finish = right")
    assert reply.status == "error" and reply.ename == "NotSequential"
    assert "is 2 times the sequential one on ranks 0,1" in reply.error
    assert "difference  allowed" in reply.error and reply.stream() == ""


def test_a_loop_that_tears_the_replicas_is_an_error_at_its_end(notebook: Notebook) -> None:
    reply = notebook.run("%%colossal dp=2 --verify\ntrain(lambda model: model.norm.weight.grad.mul_(1 + rank))")
    assert reply.status == "error" and reply.ename == "NotSequential" and reply.stream() != ""
    assert "dp=2 is NOT the sequential program at the end of this cell, though 3 steps" in reply.error
    assert "norm.weight differ between ranks 0 and 1" in reply.error
    assert "verified:" not in reply.said
    assert "verified" not in notebook.ok("%%colossal dp=2\ntrain()").said


def test_a_cell_that_does_not_train_says_that_nothing_was_compared(notebook: Notebook) -> None:
    assert "nothing was compared" in notebook.ok("%%colossal dp=2 --verify\npass").said
    reply = notebook.run("%colossal verify")
    assert "verify is an option of a cell" in reply.evalue
