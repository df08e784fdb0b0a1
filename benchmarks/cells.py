"""A trivial cell on 4 ranks through a real kernel, alternating with `%%px`."""

import argparse

from harness import Figures, Kernel, Row, finish

OURS, PEER = "%%colossal\nx = 1", "%%px\nx = 1"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=200)
    options = parser.parse_args()
    ours_s, peer_s = [], []
    with Kernel() as ours, Kernel() as peer:
        ours.run("%load_ext colossal_nb")
        ours.run("%colossal start -n 4")
        peer.run("import ipyparallel as ipp\ncluster = ipp.Cluster(n=4, log_level=40)")
        peer.run("client = cluster.start_and_connect_sync(activate=True)")
        for number in range(options.cells + 10):
            mine, theirs = ours.run(OURS).seconds, peer.run(PEER).seconds
            if number >= 10:
                ours_s.append(mine)
                peer_s.append(theirs)
        ours.run("%colossal stop")
        peer.run("cluster.stop_cluster_sync()")
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
