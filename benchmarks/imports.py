"""`import colossal_nb` and `%load_ext colossal_nb` in a fresh kernel: seconds, and that torch stays out."""

import argparse

from harness import Figures, Kernel, Row, finish


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    seconds, torch_there = [], 0
    for _ in range(options.rounds):
        with Kernel() as kernel:
            seconds.append(kernel.run("import colossal_nb\n%load_ext colossal_nb").seconds)
            torch_there += bool(kernel.value("'torch' in __import__('sys').modules"))
    figures = Figures.of(seconds)
    finish(
        "imports",
        [
            Row("import and %load_ext, seconds", figures.text("s"), "-", figures.median, 0.6),
            Row("kernels that imported torch", str(torch_there), "-", float(torch_there), 0),
        ],
    )


if __name__ == "__main__":
    main()
