"""What goes wrong around a model: one clear error each, with numbers and the way out, and the next cell trains."""
from __future__ import annotations

import pytest
from conftest import Notebook

SETUP = """%%colossal
import torch, colossal_nb as cnb
from colossal_nb.models import GPT
def gpt(**more): return GPT(**{**dict(vocab_size=16, layers=2, hidden=16, heads=2), **more})
def adam(model): return torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.arange(32).reshape(4, 8) % 16
def loss_fn(logits, targets): return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
def mixed_counts(logits, targets):
    keep = targets % 3 == 0
    return torch.nn.functional.cross_entropy(logits[keep], targets[keep]) + logits.square().mean()
uneven = torch.tensor([[0] * 8, [0] * 8, [1] * 8, [0, 1, 1, 1, 1, 1, 1, 1]])
"""
REPLICAS = "model, optimizer = cnb.parallelize(m := gpt(), adam(m))\n"

# The strategy, the cell, the error's name, words that it must say.
CELLS = [
    ("tp=2", "cnb.parallelize(gpt(heads=3, hidden=18))", "ValueError",
     "3 independent groups (heads); tp=2 does not divide them"),
    ("pp=2", "cnb.parallelize(gpt(layers=1))", "ValueError", "pp=2 is more than the 1 block of this GPT"),
    ("pp=2", REPLICAS + "loss_fn(model(tokens), tokens).backward()", "ValueError",
     "cnb.forward_backward(model, loss_fn"),
    ("dp=2", "cnb.forward_backward(model, loss_fn, tokens, tokens)", "ValueError",
     "the model is parallel as pp=2"),
    ("dp=2", "cnb.parallelize(model, optimizer)", "ValueError", "the model is parallel as pp=2"),
    ("dp=2", REPLICAS + "cnb.forward_backward(model, loss_fn, (tokens + rank) % 16, tokens)", "ValueError",
     "the batch of rank 1 differs from the others'"),
    ("dp=2", "cnb.forward_backward(model, lambda logits, targets: logits, tokens, tokens)", "ValueError",
     "a scalar or (sum, count)"),
    ("dp=2", "cnb.forward_backward(model, lambda logits, targets: None, tokens, tokens)", "ValueError", "not NoneType"),
    ("dp=2", "cnb.forward_backward(model, loss_fn, tokens, tokens[:3])", "ValueError",
     "the inputs have 4 samples, targets of shape [3, 8]"),
    ("dp=2", "cnb.forward_backward(model, lambda logits, targets: logits.detach().sum(), tokens, tokens)", "ValueError",
     "a loss without a gradient"),
    ("pp=2", REPLICAS + "cnb.forward_backward(model, lambda logits, targets: logits.detach().sum(), tokens, tokens)",
     "ValueError", "a loss without a gradient"),
    ("dp=2", "cnb.full(3)", "ValueError", "full takes one parameter, such as model.head.weight, not int"),
    ("dp=2", "cnb.full(gpt())", "ValueError", "model.state_dict() has all of them whole"),
    ("", "cnb.parallelize(gpt(), strategy=5)", "ValueError", 'a strategy is a text such as "tp=2 pp=2", not int'),
    ("", "cnb.init(3)", "ValueError", "not int"),
    ("", "cnb.once(3)", "ValueError", "once takes a function, not int"),
    ("", "gpt(vocab_size=0, layers=0)", "ValueError", "vocab_size=0, layers=0: each must be"),
    ("dp=2", REPLICAS + "cnb.forward_backward(model, loss_fn, tokens[:0], tokens[:0])", "ValueError",
     "the batch is empty"),
    ("dp=2", REPLICAS + "cnb.forward_backward(model, mixed_counts, tokens, uneven)", "ValueError",
     "F.cross_entropy(logits, targets, reduction='sum'), (targets != -100).sum()"),
    ("dp=2", "cnb.forward_backward(gpt(), loss_fn, tokens, tokens)", "ValueError", "is not parallel yet"),
    ("dp=2", "cnb.parallelize('model')", "ValueError", "takes a torch.nn.Module, not str"),
    ("dp=2", "cnb.parallelize(gpt(), adam(gpt()))", "ValueError", "the optimizer holds none of the model's parameters"),
    ("tp=2", "cnb.parallelize(m := gpt(), torch.optim.LBFGS(m.parameters()))", "ValueError", "LBFGS"),
    ("", "torch.distributed.all_reduce(torch.ones(2 + rank))", "Mismatch",
     "float32 [2], rank 1 calls all_reduce (sum) float32 [3]"),
    ("", "if rank: torch.distributed.barrier()\nelse: torch.distributed.all_reduce(torch.ones(2))", "Mismatch",
     "rank 1 calls barrier"),
    ("--ranks 0", "torch.distributed.all_reduce(torch.ones(1))", "ValueError", "runs on ranks 0 alone"),
    ("", "if rank: raise ValueError('mine')\ntorch.distributed.barrier()", "ValueError", "mine (rank 1, line 2)"),
    ("", "if rank: torch.distributed.barrier()", "Deadlock", "rank 0 finished the cell"),
]  # fmt: skip


@pytest.fixture(scope="module")
def two(notebook: Notebook) -> Notebook:
    notebook.ok("%colossal start -n 2")
    notebook.ok(SETUP)
    return notebook


@pytest.mark.parametrize("strategy, code, ename, said", CELLS, ids=range(len(CELLS)))
def test_one_clear_error_and_the_next_cell_works(two: Notebook, strategy: str, code: str, ename: str,
                                                 said: str) -> None:
    reply = two.run(f"%%colossal {strategy}\n{code}")
    assert reply.status == "error"
    assert ename in ("", reply.ename)
    assert said in reply.evalue
    assert "/colossal_nb/parallel/" not in reply.error and reply.error.count(said[:40]) <= 2
    after = two.ok("%%colossal\nones = torch.ones(1)\ntorch.distributed.all_reduce(ones)\nprint(ones.item())")
    assert after.stream() == "2.0  (same on ranks 0,1)\n"


def test_parallelize_twice_changes_nothing_and_says_so(two: Notebook) -> None:
    two.ok("%%colossal dp=2\n" + REPLICAS)
    assert "changed nothing" in two.ok("%%colossal dp=2\ncnb.parallelize(model, optimizer);").said


def test_pasted_process_group_lines_do_no_harm(two: Notebook) -> None:
    reply = two.ok("%%colossal\nimport torch.distributed as dist\ndist.init_process_group('nccl')\n"
                   "print(dist.get_world_size())\ndist.destroy_process_group()")
    assert reply.stream().startswith("2") and "init_process_group" in reply.said
    assert two.ok("%%colossal\nprint(dist.get_rank() - rank)").stream() == "0  (same on ranks 0,1)\n"


def test_files_that_both_ranks_write_are_noticed(two: Notebook) -> None:
    made = two.ok("%%colossal\nimport tempfile\nfolder = cnb.once(tempfile.mkdtemp)()\nprint(folder)").stream()
    said = two.ok("%%colossal\nopen(folder + '/log.txt', 'w').close()\ntorch.save(tokens, folder + '/t.pt')").said
    assert "ranks 0,1 wrote the same files" in said and "log.txt" in said and "t.pt" in said and "cnb.once" in said
    apart = "%%colossal\nopen(f'{folder}/{rank}.txt', 'w').close()\nopen(folder + '/log.txt').close()"
    assert made.startswith("/") and "wrote" not in two.ok(apart).said
    two.ok("%%colossal\nimport shutil\ncnb.once(shutil.rmtree)(folder)")


def test_a_parallel_model_is_not_pulled_but_its_whole_weights_are(two: Notebook) -> None:
    two.ok("%%colossal tp=2\n" + REPLICAS + "whole = model.state_dict()\nrows = len(model.state_dict())")
    for name in ("model", "optimizer"):
        reply = two.run(f"%colossal pull {name}")
        assert reply.status == "error"
        assert "whole = model.state_dict(), then %colossal pull whole" in reply.evalue
    assert two.ok("%colossal pull whole rows").status == "ok"
    assert two.ok("print(len(whole) == rows)").stream() == "True\n"
