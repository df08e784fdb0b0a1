"""Bad input gives one clear error, at once, and leaves the cluster usable with its variables."""
from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Notebook, Reply

# What is typed, the name of the error, words that it must say.
TYPED = [
    # the strategy
    ("%%colossal zz=2\npass", "ValueError", "there is no field 'zz'"),
    ("%%colossal cp=2\npass", "ValueError", "did you mean sp=2?"),
    ("%%colossal fsdp\npass", "ValueError", "did you mean zero=3?"),
    ("%%colossal microbatch=4\npass", "ValueError", "did you mean microbatches=4?"),
    ("%%colossal tp\npass", "ValueError", "tp needs a value"),
    ("%%colossal tp=0\npass", "ValueError", "tp is a whole number from 1"),
    ("%%colossal tp=2.5\npass", "ValueError", "tp is a whole number from 1"),
    ("%%colossal tp=2 tp=4\npass", "ValueError", "tp is given twice"),
    ("%%colossal dp=1000\npass", "ValueError", "needs 1000 engines"),
    ("%%colossal tp=99999999999\npass", "ValueError", "needs 99999999999 engines"),
    ("%%colossal sp=2\npass", "ValueError", "not built yet"),
    ("%%colossal zero=3 precision=bf16\npass", "ValueError", "not built yet"),
    ("%%colossal schedule=gpip pp=2\npass", "ValueError", "did you mean schedule=gpipe?"),
    ("%%colossal\u00a0zz=2\npass", "ValueError", "there is no field 'zz'"),
    ("%colossal tp=2", "ValueError", "write %%colossal tp=2 (two percent signs)"),
    # options
    ("%%colossal --rank 0\npass", "ValueError", "did you mean --ranks"),
    ("%%colossal --ranks 9\npass", "ValueError", "ranks are 0 to 1"),
    ("%%colossal tp=2 --ranks 0\npass", "ValueError", "--ranks is for cells without a strategy"),
    ("%%colossal --timeout soon\npass", "ValueError", "'soon' is no time"),
    ("%%colossal --out 2x\npass", "ValueError", "no name of a variable"),
    ("%%colossal --out class\npass", "ValueError", "'class' is no name of a variable"),
    ("%%colossal --show 7\npass", "ValueError", "--show 7: this cell runs on ranks 0,1"),
    ("%%colossal --ranks 1 --show 0\npass", "ValueError", "--show 0: this cell runs on rank 1"),
    ("%%colossal tp=2 --show 1-3\npass", "ValueError", "--show 2,3: this cell runs on ranks 0,1"),
    ('%%colossal --compare "dp=2" --show 0\npass', "ValueError", "--show does not go with --compare"),
    ("%%colossal --watch memory\npass", "ValueError", "not built yet"),
    ("%%colossal --pull nowhere\npass", "RankFailed", "has no 'nowhere'"),
    ('%%colossal --compare "tp=zz"\npass', "ValueError", "tp=zz"),
    # verbs
    ("%colossal frobnicate", "ValueError", "the verbs are"),
    ("%colossal stauts", "ValueError", "did you mean %colossal status?"),
    ("%colossal status now", "ValueError", "takes no 'now'"),
    ("%colossal start -n 0", "ValueError", "no number of engines"),
    ("%colossal start -n 1000", "ValueError", "1000 engines are more than the 64 that can be started here"),
    ("%colossal restart --rank 9", "ValueError", "there is no rank 9"),
    ("%colossal push", "ValueError", "push what?"),
    ("%colossal push nowhere", "NameError", "there is no nowhere here"),
    ("%colossal push a.b", "ValueError", "no name of a variable"),
    ("lock = __import__('threading').Lock()\n%colossal push lock", "ValueError", "lock cannot be copied to the ranks"),
    ("%colossal pull nowhere", "RankFailed", "has no 'nowhere'"),
    ("%colossal pull kept --rank 9", "ValueError", "ranks are 0 to 1"),
    ("%colossal compare", "ValueError", "compare needs strategies"),
    ('%colossal compare "tp=2 ; zz=3"', "ValueError", "there is no field 'zz'"),
    ("%colossal export", "ValueError", "export needs one file"),
    ("%colossal export train.txt", "ValueError", "a script is a .py file"),
    ("%colossal export train.py --cells 9999", "ValueError", "there is no cell 9999"),
    ("%colossal export /nowhere/at/all/train.py", "", "No such file"),
    ("%colossal help frobnicate", "ValueError", "there is no help on 'frobnicate'"),
    # cells
    ("%%colossal\ndef f(:", "SyntaxError", "invalid syntax"),
    ("%%colossal\nreturn 1", "SyntaxError", "outside function"),
    ("%%colossal\n  x = 1\n y = 2", "IndentationError", ""),
    ("%%colossal\nundefined_anywhere", "NameError", "undefined_anywhere"),
    ("%%colossal\nexit()", "UsageError", "would end this rank"),
    ("%%colossal\n%load_ext colossal_nb", "UsageError", "already runs on a rank"),
    ("only_here = 1\nget_ipython().run_cell_magic('colossal', '', 'only_here')", "NameError", "push only_here"),
    ("%%colossal\nif rank == 1: raise ValueError('one rank')", "ValueError", "one rank (rank 1, line 2)"),
    ("%%colossal\ndef deep(): deep()\ndeep()", "RecursionError", "maximum recursion depth"),
    ("%%colossal\nraise ValueError('long ' * 100_000)", "ValueError", "long long"),
    ("%%colossal\nclass Odd(Exception):\n    def __str__(self): raise RuntimeError\nraise Odd", "", ""),
    ("%%colossal\nraise KeyboardInterrupt", "KeyboardInterrupt", "rank"),
    ("%%colossal\nraise BaseExceptionGroup('two', [ValueError(), KeyboardInterrupt()])", "BaseExceptionGroup", "two"),
    ("%%colossal\nimport sys; sys.exit(3)", "SystemExit", "3"),
    ("%%colossal\ninput('name? ')", "StdinNotImplementedError", "input() is not possible on a rank"),
    ("%%colossal\nimport getpass; getpass.getpass()", "StdinNotImplementedError",
     "getpass() is not possible on a rank"),
    ("%%colossal\nbreakpoint()", "StdinNotImplementedError", "breakpoint() is not possible"),
    ("%%colossal\nimport pdb; pdb.set_trace()", "", "not possible on a rank"),
    ("%%colossal\n%debug", "UsageError", "%debug is not possible on a rank"),
    ("%%colossal\n%no_such_magic", "UsageError", "no_such_magic"),
    ("%%colossal\n%%no_such_magic\nx", "UsageError", "no_such_magic"),
    ("%%colossal\nimport os; os._exit(9)", "RankDied", "exit code 9"),
    ("%%colossal\nimport ctypes\nif rank: ctypes.string_at(0)", "RankDied", "SIGSEGV"),
]  # fmt: skip


@pytest.fixture(scope="module")
def two(notebook: Notebook, tmp_path_factory: pytest.TempPathFactory) -> Notebook:
    """Two engines that hold a variable."""
    notebook.ok(f"%cd -q {tmp_path_factory.mktemp('work')}")
    notebook.ok("%colossal start -n 2")
    notebook.ok("%%colossal tp=2\nkept = 41")
    return notebook


def usable(notebook: Notebook) -> str:
    return notebook.ok("%%colossal\nprint(kept + 1 if 'kept' in globals() else 'lost')").stream()


@pytest.mark.parametrize("code, ename, said", TYPED, ids=range(len(TYPED)))
def test_one_clear_error_and_a_usable_cluster(two: Notebook, code: str, ename: str, said: str) -> None:
    reply = two.run(code)
    assert reply.status == "error"
    assert ename in ("", reply.ename)
    assert said in reply.evalue
    assert one_error(reply), reply.error
    lost = "os._exit" in code  # both ranks have gone, and what they held
    assert usable(two) == ("lost" if lost else "42") + "  (same on ranks 0,1)\n"
    if lost:
        two.ok("%%colossal\nkept = 41")


def one_error(reply: Reply) -> bool:
    """One error message, of readable length, that shows nothing of this package's own code."""
    errors = [each for kind, each in reply.messages if kind == "error"]
    shown = reply.error + reply.stream("stderr")
    return len(errors) <= 1 and bool(shown) and len(reply.error) < 20_000 and "/colossal_nb/" not in reply.error


def test_an_empty_cell_is_no_cell(two: Notebook) -> None:
    reply = two.run("%%colossal tp=2")
    assert reply.status == "error" and "two percent signs" not in reply.evalue
    assert usable(two).startswith("42")


def test_ranks_that_print_nonsense_or_late_stay_usable(two: Notebook) -> None:
    two.run("%%colossal\nprint('\\ud800')")
    two.run("%%colossal\nimport threading, time\ndef late():\n    time.sleep(0.2)\n    print('late')\n"
            "threading.Thread(target=late).start()")
    assert "late" in two.ok("%%colossal\ntime.sleep(0.5)").stream()
    assert usable(two).startswith("42")


def test_two_notebooks_at_once_do_not_meet(two: Notebook) -> None:
    other = Notebook()
    try:
        other.ok("%load_ext colossal_nb")
        assert other.ok("%%colossal tp=2\nkept = 'theirs'\nprint(world_size)").stream() == "2\n"
        assert usable(two).startswith("42")
        other.ok("%colossal stop")
        assert usable(two).startswith("42")
    finally:
        other.close()


def test_a_failed_export_leaves_no_file(two: Notebook) -> None:
    two.ok("%%colossal tp=2\nfiles = get_ipython().getoutput('ls')")
    assert two.run("%colossal export made.py").ename == "ValueError"
    assert not Path(two.value("__import__('os').getcwd()").strip("'"), "made.py").exists()
