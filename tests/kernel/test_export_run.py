"""The exported script under torchrun prints what the cell printed."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import Notebook

TRAINING = """%%colossal tp=2
import torch, colossal_nb as cnb
from colossal_nb.models import GPT

torch.manual_seed(0)
model = GPT(vocab_size=256, layers=2, hidden=32, heads=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = cnb.corpus.batches(count=4, batch_size=4, length=16, seed=0)
def loss_fn(logits, targets): return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
model, optimizer = cnb.parallelize(model, optimizer)
for inputs, targets in batches:
    optimizer.zero_grad()
    loss = cnb.forward_backward(model, loss_fn, inputs, targets)
    optimizer.step()
    print(f"{loss.item():.4f}")
"""


def test_torchrun_prints_the_cells_losses(notebook: Notebook, tmp_path: Path) -> None:
    printed = notebook.ok(TRAINING).stream().split()
    assert len(printed) == 4 and float(printed[-1]) < float(printed[0])
    path = tmp_path / "train.py"
    notebook.ok(f"%colossal export {path}")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)],
        capture_output=True, text=True, timeout=180, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == printed
