"""10,000 distinct lines from each of 4 ranks: time, lines that can be reached, bytes to the page; against `%%px`."""

import argparse

from harness import Figures, Kernel, Row, both, finish

COUNT = 10_000
BODY = f"""for i in range({COUNT}):
    print(f"rank {{rank}} line {{i:05}} of a long text that every rank prints on its own")
"""
TEXT_BYTES = 4 * COUNT * len("rank 0 line 00000 of a long text that every rank prints on its own\n")


def reached(kernel: Kernel) -> int:
    """How many different lines of the last cell can be read from its run."""
    return int(kernel.value("len({line for r in run.ranks for line in run.text(r).splitlines() if ' line ' in line})"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    ours_s, peer_s, ours_bytes, peer_bytes, lines = [], [], [], [], []
    with both() as (ours, peer):
        for number in range(options.rounds + 1):
            mine, theirs = ours.run(f"%%colossal --out run\n{BODY}"), peer.run(f"%%px\n{BODY}")
            lines.append(reached(ours))
            if number:
                ours_s.append(mine.seconds)
                peer_s.append(theirs.seconds)
                ours_bytes.append(float(mine.page_bytes))
                peer_bytes.append(float(theirs.page_bytes))
    o, p, ob, pb = (Figures.of(values) for values in (ours_s, peer_s, ours_bytes, peer_bytes))
    whole = 4 * COUNT
    finish(
        "lines",
        [
            Row("40,000 distinct lines, time", o.text("s"), p.text("s"), o.median / p.median, 1.0),
            Row("lines missing", f"{whole - min(lines)} of {whole}", "-", float(whole - min(lines)), 0),
            Row(
                "bytes to the page, against the text",
                f"{ob.median / 1e6:.2f} MB of {TEXT_BYTES / 1e6:.2f} MB text",
                f"{pb.median / 1e6:.2f} MB",
                ob.median / TEXT_BYTES,
                2.0,
            ),
        ],
    )


if __name__ == "__main__":
    main()
