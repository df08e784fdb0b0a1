"""Execute a tutorial through a real kernel: an executed notebook, an HTML page, progress and results in the terminal.

    python tools/run_tutorial.py tutorials/01-a-cluster-in-a-cell.md --out build/demo

Cells tagged `terminal` have their output repeated in the terminal. A cell that fails, or Ctrl-C, ends the run with
status 1; what was executed up to there is written all the same.
"""

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter


def first_line(cell: nbformat.NotebookNode) -> str:
    """What a cell is called while it runs."""
    lines = [line for line in cell.source.splitlines() if line.strip()]
    return lines[0] if lines else "(empty)"


def plain(cell: nbformat.NotebookNode) -> str:
    """The text of a cell's outputs, as a terminal can show it."""
    pieces = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream" and output.name == "stdout":
            pieces.append(output.text.rstrip("\n"))
        elif "data" in output:
            pieces.append(str(output.data.get("text/plain", "")).rstrip("\n"))
    return "\n".join(piece for piece in pieces if piece)


class Progress:
    """Prints a line per code cell: number, first line, seconds."""

    def __init__(self, notebook: nbformat.NotebookNode) -> None:
        code = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
        self.number = {index: place for place, index in enumerate(code, start=1)}
        self.began = 0.0

    def start(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        """Called before a cell runs."""
        if cell_index in self.number:
            self.began = time.perf_counter()
            print(f"[{self.number[cell_index]:2}/{len(self.number)}] {first_line(cell)[:80]}", end="", flush=True)

    def done(self, cell: nbformat.NotebookNode, cell_index: int, execute_reply: dict) -> None:
        """Called after a cell ran, also when it failed."""
        failed = execute_reply["content"]["status"] == "error"
        print(f"  {time.perf_counter() - self.began:.1f} s{' FAILED' if failed else ''}", flush=True)


def stoppable(client: NotebookClient) -> None:
    """Ctrl-C interrupts the cell that runs, as the notebook's Stop; again, it ends the run without waiting for it."""
    running = asyncio.current_task()
    assert running is not None
    pressed = []

    def stop() -> None:
        if pressed:
            running.cancel()
        pressed.append(asyncio.ensure_future(client.km.interrupt_kernel()))

    for number in (signal.SIGINT, signal.SIGTERM):  # nbclient's own handlers end in its internal errors
        asyncio.get_running_loop().add_signal_handler(number, stop)


def execute(source: Path, out: Path, timeout_s: int) -> tuple[nbformat.NotebookNode, str]:
    """Run `source` with `out` as the working folder. The executed notebook, and what went wrong ("" if nothing)."""
    notebook = jupytext.read(source, fmt="md:myst" if source.suffix == ".md" else None)
    progress = Progress(notebook)

    def start(cell: nbformat.NotebookNode, cell_index: int) -> None:
        stoppable(client)
        progress.start(cell, cell_index)

    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        coalesce_streams=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(out)}},
        extra_arguments=["--IPKernelApp.log_level=40"],  # its note on unencrypted loopback is no news here
        on_cell_start=start,
        on_cell_executed=progress.done,
    )
    try:
        client.execute()
    except Exception as error:  # a cell that failed, one without end, a kernel that died: what was executed is kept
        return notebook, str(error) or type(error).__name__
    except (KeyboardInterrupt, asyncio.CancelledError):
        return notebook, "stopped"
    return notebook, ""


def write(notebook: nbformat.NotebookNode, out: Path, name: str) -> tuple[Path, Path]:
    """Write the executed notebook and its HTML page."""
    executed, page = out / f"{name}.ipynb", out / f"{name}.html"
    nbformat.write(notebook, executed)
    body, _ = HTMLExporter(embed_images=True).from_notebook_node(notebook)
    page.write_text(body)
    return executed, page


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; 0 when every cell passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one cell")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    notebook, wrong = execute(options.source, options.out.resolve(), options.timeout)
    executed, page = write(notebook, options.out, options.source.stem)
    for cell in notebook.cells:
        if "terminal" in cell.metadata.get("tags", []) and plain(cell):
            print(f"\n{plain(cell)}")
    if wrong:
        print(f"\n{wrong}", file=sys.stderr)
    upto = "Executed up to there" if wrong else "Executed notebook"
    print(f"\n{time.perf_counter() - began:.0f} s. {upto}: {executed}\nPage to look at:  {page}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
