"""What the benchmarks share: figures, the table, a real kernel, two ranks."""

import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty
from typing import Any, Self

from jupyter_client.manager import KernelManager

RESULTS = Path("build/bench")
PEER_START = """import ipyparallel as ipp
cluster = ipp.Cluster(n=4, log_level=40)
client = cluster.start_and_connect_sync(activate=True)
client[:].scatter('rank', range(4), flatten=True, block=True)
"""


@dataclass(frozen=True)
class Figures:
    """Median and 95th percentile of what was measured, and how often."""

    median: float
    p95: float
    count: int

    @classmethod
    def of(cls, values: list[float]) -> "Figures":
        """The figures of at least one value."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], len(ordered))

    def text(self, unit: str) -> str:
        """Median and p95 in `s` or `ms`; other units as they are."""
        scale = 1000 if unit == "ms" else 1
        return f"{self.median * scale:.4g} / {self.p95 * scale:.4g} {unit} ({self.count})"


@dataclass(frozen=True)
class Row:
    """One line of the table: ours against the peer's, the ratio that counts and its bar."""

    what: str
    ours: str
    peer: str
    ratio: float
    bar: float
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the ratio is within the bar."""
        return self.ratio <= self.bar


def table(rows: list[Row]) -> str:
    """A markdown table."""
    lines = ["| what | ours | peer | ratio | bar | met | note |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        met = "yes" if row.met else "**no**"
        lines.append(f"| {row.what} | {row.ours} | {row.peer} | {row.ratio:.3f} | {row.bar:g} | {met} | {row.note} |")
    return "\n".join(lines)


def finish(name: str, rows: list[Row]) -> None:
    """Print the table and keep it as build/bench/<name>.json for `run.py`."""
    print(table(rows), flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))


def interval(ratios: list[float], draws: int = 4000) -> tuple[float, float]:
    """The 95% interval of the median by resampling (fixed seed)."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


@dataclass(frozen=True)
class Cell:
    """What a cell did: seconds from the request to idle and reply, status, text shown, bytes of the output messages."""

    seconds: float
    status: str
    text: str
    page_bytes: int


class Kernel:
    """A real ipykernel, driven over its sockets as a front end does."""

    def __enter__(self) -> Self:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=tempfile.gettempdir(), extra_arguments=["--IPKernelApp.log_level=40"])
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)

    def run(self, source: str, timeout_s: float = 300, *, check: bool = True) -> Cell:
        """Run a cell to its end; raises RuntimeError with its text when it failed."""
        began = time.perf_counter()
        request = self.client.execute(source)
        text, page_bytes = [], 0
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=timeout_s)
            except Empty:
                raise RuntimeError(f"no end within {timeout_s} s: {source[:200]}") from None
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind in ("stream", "display_data", "update_display_data", "execute_result", "error", "comm_msg"):
                page_bytes += len(json.dumps(content))
                text.append(content.get("text") or content.get("data", {}).get("text/plain", "") or str(content))
        reply = self.client.get_shell_msg(timeout=timeout_s)
        cell = Cell(time.perf_counter() - began, reply["content"]["status"], "".join(text), page_bytes)
        if check and cell.status != "ok":
            raise RuntimeError(f"{cell.status}: {source[:200]}\n{cell.text[-3000:]}")
        return cell

    def value(self, expression: str) -> Any:
        """The value of an expression in the kernel, sent as JSON."""
        shown = self.run(f"import json as _json; print('\\x02' + _json.dumps({expression}) + '\\x03')").text
        return json.loads(shown.split("\x02")[1].split("\x03")[0])


@contextmanager
def peer() -> Iterator[tuple[Kernel, float]]:
    """A kernel whose `%%px` runs on 4 engines that know their `rank`, and the seconds that their start took."""
    with Kernel() as kernel:
        seconds = kernel.run(PEER_START).seconds
        yield kernel, seconds
        kernel.run("cluster.stop_cluster_sync()")


@contextmanager
def both() -> Iterator[tuple[Kernel, Kernel]]:
    """Ours and the peer, 4 engines each, ready for cells."""
    with Kernel() as ours, peer() as (theirs, _):
        ours.run("%load_ext colossal_nb")
        ours.run("%colossal start -n 4")
        yield ours, theirs
        ours.run("%colossal stop")


def _rank(work: Callable[..., Any], rank: int, folder: str, answers: Any, arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    result = work(rank, folder, *arguments)
    if rank == 0:
        answers.put(result)


def on_two_ranks(work: Callable[..., Any], *arguments: Any, timeout_s: float = 900) -> Any:
    """Run `work(rank, folder, *arguments)` in two new processes; what rank 0 returned.

    Each has half of the usable cores as threads; `folder` is empty and shared, for rendezvous files.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        both = [context.Process(target=_rank, args=(work, rank, folder, answers, arguments)) for rank in range(2)]
        for one in both:
            one.start()
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    return answers.get(timeout=1)
                except Empty:
                    if any(one.exitcode for one in both) or time.monotonic() > deadline:
                        raise RuntimeError(f"no answer: exit codes {[one.exitcode for one in both]}") from None
        finally:
            for one in both:
                one.join(timeout=5)
                if one.is_alive():
                    one.kill()
