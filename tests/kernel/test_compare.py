"""One cell under several strategies: a table, a picture, and rows for what failed."""
from __future__ import annotations

import pytest
from conftest import Notebook

TRAIN = """import torch, colossal_nb as cnb
from colossal_nb.models import GPT
torch.manual_seed(0)
model = GPT(vocab_size=16, layers=2, hidden=16, heads=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.arange(64).reshape(8, 8) % 16
def loss_fn(logits, targets): return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
model, optimizer = cnb.parallelize(model, optimizer)
for _ in range(3):
    optimizer.zero_grad()
    loss = cnb.forward_backward(model, loss_fn, tokens, tokens)
    optimizer.step()
    print('never shown')
"""


def test_the_last_cell_runs_under_each_strategy(notebook: Notebook) -> None:
    notebook.ok(f"%%colossal dp=2\n{TRAIN}")
    reply = notebook.ok('%colossal compare "dp=1 ; dp=2 ; tp=2 ; pp=2"')
    table = next(data for data in reply.displays if str(data["text/plain"]).startswith("strategy "))
    rows = [line.split() for line in str(table["text/plain"]).splitlines()]
    assert [row[0] for row in rows[1:5]] == ["dp=1", "dp=2", "tp=2", "pp=2"]
    assert all(word in rows[6] for word in ("peak", "parameters", "gradients", "states", "activations"))
    assert [row[0] for row in rows[7:]] == ["dp=1", "dp=2", "tp=2", "pp=2"] and rows[5] == []
    assert "reference" in rows[1] and "<table>" in table["text/html"]
    assert reply.stream() == ""
    picture = next(data for data in reply.displays if "image/svg+xml" in data)
    assert str(picture["text/plain"]).startswith("4 strategies compared; shortest time of a step")
    assert "Peak memory: dp=1 " in str(picture["text/plain"])
    assert picture["text/html"].count("<svg") == 1 and "no result" not in picture["text/html"]
    assert "the ranks keep the variables of the last run, pp=2" in reply.said


def test_what_fails_is_a_row_and_the_others_run(notebook: Notebook) -> None:
    line = '%%colossal --compare "tp=4 ; zero=1 ; dp=4 ; dp=2" --out runs'
    notebook.ok("%colossal restart")                   # no rank begins later than a model
    reply = notebook.ok(f"{line}\n{TRAIN}\nif world_size == 4: raise OSError('four')")   # Run All goes on
    assert reply.said.count("has grown from 2 to 4 engines") == 1 and "for tp=4, and they stay" in reply.said
    rows = [line for line in reply.said.splitlines() if line.startswith(("tp=4", "zero=1", "dp=4", "dp=2"))]
    assert "ValueError: " in rows[0] and "tp=4 does not divide" in rows[0]
    assert "ValueError: " in rows[1] and "not built" in rows[1]
    assert rows[2].endswith("OSError: four") and "Error" not in rows[3]
    assert notebook.value("[run.status for run in runs]") == "['error', 'error', 'ok']"
    assert sum("no result" in str(data.get("text/html", "")) for data in reply.displays) == 1
    lacking = notebook.run("%%colossal\nmodel.training")
    assert lacking.ename == "NameError" and "model is on ranks 0, 1 alone, as after a cell that ran" in lacking.evalue
    reply = notebook.run('%%colossal --compare "zero=1 ; dp=2"\nraise OSError("all")')
    assert reply.ename == "ValueError" and "not built" in reply.evalue and "OSError: all" in reply.said
    assert "grown" not in reply.said


def test_stop_in_the_middle_keeps_what_was_finished(notebook: Notebook) -> None:
    pid = int(notebook.value("__import__('os').getpid()"))
    stop = f"import os, time\nif world_size == 4:\n    if rank == 0: os.kill({pid}, 2)\n    time.sleep(60)"
    reply = notebook.run(f'%%colossal --compare "dp=2 ; dp=4 ; tp=2"\n{stop}')
    assert reply.status == "error" and reply.ename == "KeyboardInterrupt"
    rows = [line.split("  ") for line in reply.said.splitlines() if line.startswith(("dp=2 ", "dp=4 "))]
    assert [row[0] for row in rows] == ["dp=2", "dp=4"]
    assert rows[1][-1].strip() == "stopped" and "1 strategy was not run" in reply.said
    assert notebook.ok("%%colossal dp=2\nprint(world_size)").stream() == "2\n"


@pytest.mark.parametrize("line", ['%colossal compare ""', '%%colossal --compare "tp=zz"\npass'])
def test_what_is_no_strategy_is_refused_at_once(notebook: Notebook, line: str) -> None:
    assert notebook.run(line).ename == "ValueError"
