"""A trivial cell on 4 ranks through a real kernel, alternating with `%%px`."""

import argparse

from harness import Figures, Row, both, finish

OURS, PEER = "%%colossal\nx = 1", "%%px\nx = 1"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=200)
    options = parser.parse_args()
    ours_s, peer_s = [], []
    with both() as (ours, peer):
        for number in range(options.cells + 10):
            mine, theirs = ours.run(OURS).seconds, peer.run(PEER).seconds
            if number >= 10:
                ours_s.append(mine)
                peer_s.append(theirs)
    o, p = Figures.of(ours_s), Figures.of(peer_s)
    finish(
        "cells",
        [
            Row("trivial cell, median", o.text("ms"), p.text("ms"), o.median / p.median, 1.05),
            Row("trivial cell, p95", o.text("ms"), p.text("ms"), o.p95 / p.p95, 1.2),
        ],
    )


if __name__ == "__main__":
    main()
