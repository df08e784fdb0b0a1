"""What the page says of ranks that are stuck, lost or new, and of functions that are pushed."""
from __future__ import annotations

import threading

from conftest import Notebook, Reply


def stopped(notebook: Notebook, code: str, after_s: float = 2.0) -> Reply:
    """Run it and press Stop after a moment."""
    timer = threading.Timer(after_s, notebook.manager.interrupt_kernel)
    timer.start()
    reply = notebook.run(code)
    timer.join()
    return reply


def rows(reply: Reply) -> dict[str, str]:
    """rank -> what it does, from the table of `status`."""
    lines = [line.split(maxsplit=2) for line in reply.said.splitlines()]
    return {line[0]: line[2] for line in lines if len(line) == 3 and line[0].isdigit() and line[1].isdigit()}


def test_pushed_functions_see_the_ranks_names_and_bring_what_they_lack(notebook: Notebook) -> None:
    notebook.ok("%%colossal\nscale = 10 * rank\n_bonus = 1")
    notebook.ok("import threading, math\nscale, _bonus, offset, lock = 2, 7, 5, threading.Lock()\n"
                "def helper(x): return x * scale + offset\n"
                "def f(x):\n    return helper(x) + _bonus + math.floor(0.5)\n"
                "def g(x):\n    with lock: return f(x)")
    reply = notebook.ok("%colossal push f")
    assert reply.said.splitlines() == ["pushed f to 4 ranks",
                                       "with helper, math, offset, which they read and the ranks did not have"]
    printed = notebook.ok("%%colossal --show all\nprint(f(1), f.__globals__ is globals(), scale)").stream()
    assert [f"{10 * rank + 6} True {10 * rank}" in printed for rank in range(4)] == [True] * 4
    said = notebook.ok("%colossal push g").said
    assert "lock, which they read, is not on the ranks and cannot be copied (TypeError): make it in a cell" in said
    notebook.ok("%%colossal\nimport threading\nlock, scale = threading.Lock(), 3")
    assert notebook.ok("%%colossal\nprint(g(2))").stream().startswith("12 ")
    notebook.ok("def helper(x): return 100")           # pushed itself it takes the place of the ranks' own
    notebook.ok("%colossal push helper")
    assert notebook.ok("%%colossal\nprint(f(2))").stream().startswith("101 ")


def test_a_function_that_is_pulled_with_a_parallel_model_inside_is_refused(notebook: Notebook) -> None:
    notebook.ok("%%colossal tp=2\nimport torch, colossal_nb as cnb\n"
                "net = cnb.models.MLP(features=8, hidden=16, classes=4, layers=2)\nnet = cnb.parallelize(net)\n"
                "def use(x): return net(x)\nkept_in = {'deep': [net]}\ndef plain(x): return 3 * x")
    for name in ("use", "kept_in"):
        assert "whole = model.state_dict()" in notebook.run(f"%colossal pull {name}").evalue
    notebook.ok("%colossal pull plain")
    assert notebook.value("plain(2)") == "6"


def test_stuck_ranks_are_shown_and_one_line_mends_them(notebook: Notebook) -> None:
    reply = stopped(notebook, "%%colossal\nimport time\nif rank in (1, 2):\n    while True:\n"
                              "        try: time.sleep(300)\n        except KeyboardInterrupt: pass")
    number = notebook.value("len(In) - 2")
    assert "%colossal restart --rank 1,2`" in reply.error
    shown = rows(notebook.ok("%colossal status"))
    assert shown["0"] == shown["3"] == "ready"
    assert all(shown[rank].startswith(f"still in cell {number}, line 5 (since ") for rank in ("1", "2")), shown
    said = notebook.ok("%colossal who").said
    assert f"rank 1: still in cell {number}, line 5" in said and "its variables cannot be seen" in said
    assert "plain" in said
    assert "restart --rank 1,2`" in notebook.run("%%colossal\n1").evalue
    said = notebook.ok("%colossal restart --rank 1,2").said
    assert "ranks 1, 2 are replaced, with copies of rank" in said and "net (is parallel)" in said
    assert rows(notebook.ok("%colossal status")) == dict.fromkeys("0123", "ready")
    assert notebook.ok("%%colossal\nprint(plain(2))").stream() == "6  (same on ranks 0-3)\n"


def test_a_name_that_lived_on_another_process_is_explained(notebook: Notebook) -> None:
    reply = notebook.run("%%colossal\nnet(torch.ones(2, 8))")
    assert "this model lost the parts of ranks 1, 2: run the cell that makes it again" in reply.error
    assert "net is not on ranks 1, 2, which were replaced (net is parallel): run the cell that makes net" in reply.error


def test_the_loss_of_all_ranks_names_all_and_status_tells_it_once(notebook: Notebook) -> None:
    reply = notebook.run("%%colossal\nimport os\nos._exit(3)")
    assert all(f"rank {rank} (process" in reply.error for rank in range(4)), reply.error
    assert "all ranks are new and empty: the variables of the old ones are gone" in reply.said
    said = notebook.ok("%colossal").said
    assert "ranks 0-3 were lost: exit code 3" in said
    notebook.ok("%%colossal\npass")
    said = notebook.ok("%colossal").said
    assert "were lost" not in said and "processes ended before the last cell or restart" in said
