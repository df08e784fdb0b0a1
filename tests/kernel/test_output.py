"""Output of the ranks through a real kernel, as people expect it."""
from __future__ import annotations

import time

import nbformat
import pytest
from conftest import Notebook
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def test_equal_lines_once_others_marked(notebook: Notebook) -> None:
    reply = notebook.ok("%%colossal\nprint('equal')\nprint('zero' if rank == 0 else 'other')\nprint('equal')")
    assert reply.stream() == "equal  (same on ranks 0-3)\n[0] zero\n[1-3] other\nequal\n"


def test_output_is_streamed(notebook: Notebook) -> None:
    sent = notebook.client.execute("%%colossal\nimport time\nprint('first', flush=True)\ntime.sleep(2)\nprint('last')")
    seen: dict[str, float] = {}
    while "idle" not in seen:
        message = notebook.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != sent:
            continue
        if message["msg_type"] == "stream":
            seen[message["content"]["text"].split()[0]] = time.monotonic()
        elif message["content"].get("execution_state") == "idle":
            seen["idle"] = time.monotonic()
    assert seen["last"] - seen["first"] > 1.0


def test_stderr_and_warnings(notebook: Notebook) -> None:
    reply = notebook.ok("%%colossal\nimport sys, warnings\n"
                        "print('to stderr', file=sys.stderr)\nwarnings.warn('careful')")
    assert "to stderr" in reply.stream("stderr")
    assert "cell, line 4: UserWarning: careful" in reply.stream("stderr")
    assert reply.stream("stderr").count("careful") == 2  # the message and its source line
    assert reply.stream() == ""


@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto", "tqdm.notebook"])
def test_equal_bars_are_one(notebook: Notebook, module: str) -> None:
    reply = notebook.ok(f"%%colossal\nfrom {module} import tqdm\nimport time\n"
                        "for _ in tqdm(range(50), desc='all'): time.sleep(0.01)")
    bars = [data["text/plain"] for data in reply.displays if "all:" in data["text/plain"]]
    assert len(bars) == 1 and bars[0].startswith("all: 100%") and "50/50" in bars[0]
    assert sum(kind == "update_display_data" for kind, _ in reply.messages) <= 20


def test_different_bars_are_one_each(notebook: Notebook) -> None:
    reply = notebook.ok("%%colossal\nfrom tqdm import tqdm\nfor _ in tqdm(range(10 * (1 + (rank > 1)))): pass")
    rows = [row for data in reply.displays for row in data["text/plain"].splitlines()]
    assert [row.split("]")[0] for row in rows] == ["[0,1", "[2,3"]
    assert "10/10" in rows[0] and "20/20" in rows[1]


def test_a_line_that_is_drawn_over_keeps_its_place(notebook: Notebook) -> None:
    reply = notebook.ok("%%colossal dp=4\nprint('before'); print('a\\rb'); print('tab')")
    shown = [each.get("text") or each["data"]["text/plain"] for kind, each in reply.messages
             if kind in ("stream", "display_data")]
    assert "".join(f"{text.strip()} " for text in shown).startswith("before b tab ")


def test_pandas_and_matplotlib_once_where_equal(notebook: Notebook) -> None:
    reply = notebook.ok("%%colossal\nimport pandas\npandas.DataFrame({'a': [1, 2]})")
    tables = [data for data in reply.displays if "text/html" in data]
    assert len(tables) == 1 and "<table" in tables[0]["text/html"]
    reply = notebook.ok("%%colossal\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\n"
                        "plt.plot([1, 2 + rank // 2])\nplt.show()")
    assert sum("image/png" in data for data in reply.displays) == 3


def test_the_last_expression(notebook: Notebook) -> None:
    assert notebook.ok("%%colossal\nrank").said == "[0] 0\n[1] 1\n[2] 2\n[3] 3"
    assert notebook.ok("%%colossal tp=2\n{'a': 1}").displays[0]["text/plain"] == "{'a': 1}"
    assert notebook.ok("%%colossal\nrank;").said == ""


def test_shell_timeit_time_await_and_help(notebook: Notebook) -> None:
    assert notebook.ok("%%colossal\n!echo from a shell").stream() == "from a shell  (same on ranks 0-3)\n"
    timed = notebook.ok("%%colossal\n%timeit -r 2 sum(range(100))").stream()
    assert sorted(line[:4] for line in timed.splitlines() if "per loop" in line) == ["[0] ", "[1] ", "[2] ", "[3] "]
    assert "Wall time" in notebook.ok("%%colossal\n%%time\nsum(range(10))").stream()
    awaited = notebook.ok("%%colossal\nimport asyncio\nawait asyncio.sleep(0.01)\nprint('awaited')")
    assert awaited.stream().startswith("awaited")
    assert notebook.ok("%%colossal\nprint('the next cell')").stream().startswith("the next cell")
    assert "Return the number of items" in notebook.ok("%%colossal\nlen?").said
    notebook.ok('%%colossal\ndef loss_fn(x):\n    """Doubles."""')
    assert notebook.ok("%%colossal\nloss_fn?").said.count("Doubles.") == 1


def test_displays_that_are_updated_and_cleared(notebook: Notebook) -> None:
    reply = notebook.ok("%%colossal\nfrom IPython.display import HTML, clear_output, display\n"
                        "shown = display(HTML('<i>one</i>'), display_id=True)\nshown.update(HTML('<i>two</i>'))")
    assert [data["text/html"] for data in reply.displays] == ["<i>two</i>"]
    kinds = [kind for kind, _ in notebook.ok("%%colossal\nclear_output(wait=True)\nprint('new')").messages]
    assert kinds.count("clear_output") == 1


def test_forty_thousand_lines_arrive_and_can_be_reached(notebook: Notebook) -> None:
    reply = notebook.ok("%%colossal --out run\nfor i in range(10_000): print(f'rank {rank} line {i} ' + 'x' * 40)")
    lines = "{line for rank in run.ranks for line in run.text(rank).splitlines()}"
    assert notebook.value(f"len({lines})") == "40000"
    assert notebook.value("sum(run.text(rank).count('\\n') for rank in run.ranks)") == "40000"
    assert reply.size <= 2 * int(notebook.value("sum(len(run.text(rank)) for rank in run.ranks)"))


def test_a_megabyte_of_stderr_blocks_nobody(notebook: Notebook) -> None:
    reply = notebook.ok("%%colossal --out run\nimport sys\nsys.stderr.write('e' * 1_000_000 + '\\n')\nprint('through')")
    assert reply.stream().startswith("through")
    assert notebook.value("len(run.text(3, 'stderr'))") == "1000001"


def test_show(notebook: Notebook) -> None:
    assert notebook.ok("%%colossal --show 0\nprint(rank)\nrank").stream() == "[0] 0\n"
    assert sorted(notebook.ok("%%colossal --show all\nprint(rank)").stream().split("\n")) == [
        "", "[0] 0", "[1] 1", "[2] 2", "[3] 3"]


def test_an_error_of_all_ranks_is_shown_once(notebook: Notebook) -> None:
    reply = notebook.run("%%colossal\nprint('before')\n\n1 / 0  # here")
    assert (reply.status, reply.ename) == ("error", "ZeroDivisionError")
    assert reply.stream() == "before  (same on ranks 0-3)\n"
    assert reply.error.count("ZeroDivisionError: division by zero") == 1
    assert "all ranks (0-3)" in reply.error and "----> 4 1 / 0  # here" in reply.error
    assert "ranks 0-3, line 4" in reply.evalue
    assert "/colossal_nb/notebook/" not in reply.error


def test_traces_name_the_notebooks_cells(notebook: Notebook) -> None:
    reply = notebook.run("%%colossal\nraise KeyError('k')")
    number = next(each["execution_count"] for kind, each in reply.messages if kind == "execute_input")
    assert f"In[{number}], line 2" in reply.error


def test_the_first_cause_comes_first_and_consequences_are_one_line(notebook: Notebook) -> None:
    reply = notebook.run("%%colossal dp=4\nimport torch\nif rank == 2:\n    raise ValueError('bad batch')\n"
                         "torch.distributed.barrier()")
    assert reply.ename == "ValueError"
    assert reply.evalue == "bad batch (rank 2, line 4)"
    assert reply.error.index("rank 2 raised this") < reply.error.index("ValueError: bad batch")
    assert reply.error.strip().splitlines()[-1] == "ranks 0,1,3: stopped because of that (line 5)"
    assert notebook.ok("%%colossal\nprint('usable')").stream().startswith("usable")


def test_different_errors_are_apart(notebook: Notebook) -> None:
    reply = notebook.run("%%colossal\nraise [ValueError, KeyError][rank % 2](f'r{rank}')")
    assert reply.error.count("raised this first") == 1
    assert ("ValueError" in reply.error) and ("KeyError" in reply.error)
    assert all(f"r{rank}" in reply.error for rank in range(4))


def test_a_dead_rank_is_named_and_replaced(notebook: Notebook) -> None:
    reply = notebook.run("%%colossal\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert (reply.status, reply.ename) == ("error", "RankDied")
    assert "rank 1" in reply.evalue and "SIGKILL" in reply.evalue
    assert notebook.ok("%%colossal\nprint(world_size)").stream() == "4  (same on ranks 0-3)\n"


@pytest.mark.parametrize("body", [
    "while True: pass", "import torch\nif rank: torch.distributed.barrier()\nwhile True: pass"])
def test_stop_is_a_keyboard_interrupt_and_variables_are_kept(notebook: Notebook, body: str) -> None:
    notebook.ok("%%colossal\nkept = 41 + rank")
    sent = notebook.client.execute(f"%%colossal\nprint('in', flush=True)\n{body}")
    while True:
        message = notebook.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") == sent and message["msg_type"] == "stream":
            break
    notebook.manager.interrupt_kernel()
    content = notebook.answer(sent)
    assert (content["status"], content["ename"]) == ("error", "KeyboardInterrupt")
    assert notebook.ok("%%colossal\nprint(kept - rank)").stream() == "41  (same on ranks 0-3)\n"


def test_a_timeout_says_so(notebook: Notebook) -> None:
    reply = notebook.run("%%colossal --timeout 1s\nwhile True: pass")
    assert reply.ename == "TimeoutError" and "longer than 1 s" in reply.evalue
    assert "longer than 1 s" in reply.error


def test_a_wait_without_end_is_told_and_ended(notebook: Notebook) -> None:
    reply = notebook.run("%%colossal\nimport torch\nif rank != 3: torch.distributed.barrier()")
    assert reply.ename == "Deadlock"
    assert "rank 3" in reply.said and "finished the cell" in reply.said
    assert notebook.ok("%%colossal\nprint('usable')").stream().startswith("usable")


def test_nbclient_stops_at_the_failing_cell() -> None:
    cells = ["%load_ext colossal_nb", "%%colossal tp=2\nprint('ran')", "%%colossal\nif rank: raise ValueError('no')",
             "late = 1"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with pytest.raises(CellExecutionError) as caught:
        NotebookClient(book, timeout=120, kernel_name="python3").execute()
    assert (caught.value.ename, caught.value.evalue) == ("ValueError", "no (rank 1, line 2)")
    assert book.cells[1].outputs[0]["text"] == "ran\n"
    assert book.cells[3].outputs == [] and book.cells[3].execution_count is None


def test_a_block_that_does_not_ask_whose_turn_it_is_is_told_that_all_ran_it(notebook: Notebook) -> None:
    notebook.ok("%%colossal\nimport colossal_nb as cnb")
    reply = notebook.ok("%%colossal dp=4\nfor _ in range(3):\n    with cnb.once():\n        print('once', rank)")
    assert "[0] once 0" in reply.stream()
    assert reply.said.count("every rank ran the block of `with cnb.once()`") == 1
    reply = notebook.ok("%%colossal dp=4\nwith cnb.once() as mine:\n    if mine:\n        print('once', rank)")
    assert reply.stream() == "[0] once 0\n" and "every rank ran" not in reply.said
