"""How long `cnb.verify` takes: three steps of a GPT of hidden size 256 against the sequential program, 4 engines.

Through a session, as a cell of a notebook runs it; the whole call, copies and comparison too. The bar is 10 seconds.
"""

import argparse

from harness import Figures, Row, finish

from colossal_nb.session import Session

BAR_S = 10.0
STRATEGY = "tp=2 pp=2 microbatches=4"
MAKE = """
import torch, colossal_nb as cnb
from colossal_nb.models import GPT
torch.manual_seed(0)
model = GPT(vocab_size=256, layers=4, hidden=256, heads=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
inputs, targets = next(iter(cnb.corpus.batches(count=1, batch_size=16, length=128, seed=0)))
def loss_fn(logits, targets): return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
model, optimizer = cnb.parallelize(model, optimizer)
"""
VERIFY = """
report = cnb.verify(model, loss_fn, inputs, targets)
print(report.seconds)
print(report)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    session, seconds, said = Session(), [], ""
    try:
        session.run(MAKE, STRATEGY).wait()
        for _ in range(options.times):
            run = session.run(VERIFY, STRATEGY).wait()
            first, _, said = run.text(0).partition("\n")
            if run.status != "ok" or not said.startswith("verified"):
                raise RuntimeError(f"not verified: {said or run.error}")
            seconds.append(float(first))
    finally:
        session.stop()
    figures = Figures.of(seconds)
    note = said.partition("\n")[0].partition("(")[2].rstrip(")")
    row = Row("verify, GPT hidden 256, tp=2 pp=2", figures.text("s"), "-", figures.median / BAR_S, 1.0, note)
    finish("verify", [row])


if __name__ == "__main__":
    main()
