"""All benchmarks, one after another, and one table (also as build/bench/table.md)."""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from harness import RESULTS, Row, table

NAMES = ("imports", "start", "cells", "lines", "step", "recording", "verify", "saving", "precision")


def main() -> int:
    """Run those that were named, or all; 1 when one of them failed to run."""
    names = sys.argv[1:] or list(NAMES)
    failed, rows = [], []
    for name in names:
        (RESULTS / f"{name}.json").unlink(missing_ok=True)
        print(f"\n{name}", flush=True)
        if subprocess.run([sys.executable, Path(__file__).with_name(f"{name}.py")], check=False).returncode:
            failed.append(name)
        else:
            rows += [Row(**row) for row in json.loads((RESULTS / f"{name}.json").read_text())]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    head = f"{machine}, torch {version('torch')}, ipyparallel {version('ipyparallel')}. Median / p95 (count)."
    text = f"{head}\n\n{table(rows)}\n"
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "table.md").write_text(text)
    print(f"\n{text}")
    if failed:
        print(f"did not run: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
