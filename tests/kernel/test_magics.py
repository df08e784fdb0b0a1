"""The magics through a real kernel: loading, verbs, options, completion, help, summary."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Notebook, eventually


def test_loading_imports_no_torch_and_again_changes_nothing(notebook: Notebook) -> None:
    notebook.ok("%reload_ext colossal_nb\n%load_ext colossal_nb")
    assert notebook.value("{'torch', 'matplotlib', 'pandas'} & set(__import__('sys').modules)") == "set()"
    assert notebook.value("get_ipython().Completer.custom_matchers.__len__()") == "1"


def test_status_before_anything_runs_says_what_to_do() -> None:
    code = ("from IPython.core.interactiveshell import InteractiveShell\nshell = InteractiveShell.instance()\n"
            "from colossal_nb.notebook.magics import Notebook\nfrom colossal_nb.session import Session\n"
            "class Page:\n    def display(self, data, *rest, **more): print(data['text/plain'])\n"
            "Notebook(shell, Session(), Page()).line('')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "no engines run; the first %%colossal cell starts them\n"


def test_the_first_cell_starts_four_engines(notebook: Notebook) -> None:
    assert notebook.ok("%%colossal\nprint(world_size)").stream() == "4  (same on ranks 0-3)\n"
    assert notebook.ok("%colossal").said.startswith("4 engines, ")


def test_start_never_takes_engines_away(notebook: Notebook) -> None:
    reply = notebook.run("%colossal start -n 2")
    assert reply.status == "error" and "fewer need %colossal stop first" in reply.evalue


def test_out_binds_the_run_and_last_run_keeps_it(notebook: Notebook) -> None:
    notebook.ok("%%colossal --out first\nprint('kept', rank)")
    assert notebook.value("first is cnb.last_run, first.status, first.text(2)") == "(True, 'ok', 'kept 2\\n')"
    notebook.ok("%%colossal\npass")
    assert notebook.value("first is cnb.last_run") == "False"


def test_push_and_pull(notebook: Notebook) -> None:
    notebook.ok("import math\ndef double(x):\n    return 2 * x\nclass Pair:\n    both = (1, 2)\nvalue = [3.5]")
    assert notebook.ok("%colossal push math double Pair, value").said == "pushed math, double, Pair, value to 4 ranks"
    printed = notebook.ok("%%colossal\nprint(double(value[0]), Pair.both, math.floor(2.5))").stream()
    assert printed.startswith("7.0 (1, 2) 2 ")
    notebook.ok("%%colossal\nimport torch\nmine = torch.full((2,), float(rank))")
    assert notebook.ok("%colossal pull mine --rank 3").said == "mine: ndarray from rank 3"
    assert notebook.value("mine") == "array([3., 3.], dtype=float32)"
    notebook.ok("%%colossal --pull mine,other\nother = rank + 10")
    assert notebook.value("mine.tolist(), other") == "([0.0, 0.0], 10)"


def test_names_that_only_the_kernel_has_are_listed_at_once(notebook: Notebook) -> None:
    notebook.ok("only_here, here_too = 1, 2")
    reply = notebook.run("%%colossal\nprint('ran')\nprint(only_here + here_too)")
    assert reply.ename == "NameError" and reply.stream() == ""
    assert "%colossal push only_here here_too" in reply.evalue
    notebook.ok("%colossal push only_here here_too")
    assert notebook.ok("%%colossal\nprint(only_here + here_too)").stream().startswith("3")


def test_who_names_variables_and_where_they_are(notebook: Notebook) -> None:
    notebook.ok("%%colossal\neverywhere = 'a'\nif rank == 2: alone = 5")
    rows = [line.split() for line in notebook.ok("%colossal who").said.splitlines()]
    assert ["everywhere", "str", "'a'", "all", "ranks"] in rows
    assert ["alone", "int", "5", "rank", "2"] in rows


def test_a_subset_of_ranks(notebook: Notebook) -> None:
    assert notebook.ok("%%colossal --ranks 1,3\nprint('here')").stream() == "here  (same on ranks 1,3)\n"


def test_local_runs_the_cell_here_as_well(notebook: Notebook) -> None:
    notebook.ok("%%colossal --local\nin_both = 11")
    assert notebook.value("in_both") == "11"


def test_a_strategy_cell_ends_with_its_line(notebook: Notebook) -> None:
    said = notebook.ok("%%colossal tp=2 # two and two\npass").said
    assert said.startswith("4 engines, dp=2 (filled) tp=2 | ")


def test_a_short_bare_cell_ends_without_one(notebook: Notebook) -> None:
    assert notebook.ok("%%colossal\npass").said == ""


def test_restart_of_one_rank_copies_names(notebook: Notebook) -> None:
    notebook.ok("%%colossal\nkept = 5")
    assert "rank 2 is replaced" in notebook.ok("%colossal restart --rank 2").said
    assert notebook.ok("%%colossal\nprint(kept)").stream() == "5  (same on ranks 0-3)\n"


def test_fields_values_options_and_verbs_are_completed(notebook: Notebook) -> None:
    assert notebook.matches("%%colossal ") == notebook.matches("%%colossal \nx = 1", 11)
    assert {"dp=", "tp=", "microbatches=", "--ranks", "--out"} <= set(notebook.matches("%%colossal "))
    assert notebook.matches("%%colossal tp=2 sch") == ["schedule="]
    assert notebook.matches("%%colossal schedule=g") == ["schedule=gpipe"]
    assert notebook.matches("%%colossal tp=2 --sh") == ["--show"]
    assert notebook.matches("%colossal st") == ["start", "status", "stop"]
    assert notebook.matches("%colossal restart --r") == ["--rank"]


def test_the_ranks_variables_are_completed_and_explained_below_the_line(notebook: Notebook) -> None:
    notebook.ok('%%colossal\ndef only_on_ranks(x):\n    """Doubles."""\nclass Thing:\n    some_field = 1')
    assert notebook.matches("%%colossal\nonly_on_r") == ["only_on_ranks"]
    assert notebook.matches("%%colossal\nunrun_one = 1\nfor unrun_two in []:\n    unrun_") == [
        "unrun_one", "unrun_two"]
    assert notebook.matches("%%colossal\nsome_f = 1\nThing.some_f")[0].endswith("some_field")
    assert "some_field" in [match.split(".")[-1] for match in notebook.matches("%%colossal\nx = 1\nThing.some_f")]
    code = "%%colossal tp=2\nonly_on_ranks"
    reply = notebook.inspect(code, len(code) - 3)
    assert reply["found"] and "Doubles." in reply["data"]["text/plain"]
    assert "pipeline stages" in notebook.inspect("%%colossal pp=2\nx", 12)["data"]["text/plain"]
    notebook.ok("plain_here = 1")
    assert notebook.inspect("plain_here", 3)["found"]
    assert notebook.matches("plain_h") == ["plain_here"]
    assert notebook.matches("%colossal push plain_h") == ["plain_here"]
    assert notebook.matches("%colossal pull only_on_r") == ["only_on_ranks"]


def test_the_first_completion_after_training_is_there(notebook: Notebook) -> None:
    notebook.ok("%%colossal dp=4\nimport torch, torch.nn as nn\nimport colossal_nb as cnb\n"
                "model, loss_fn = nn.Linear(4, 2), nn.CrossEntropyLoss()\n"
                "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
                "model, optimizer = cnb.parallelize(model, optimizer)\n"
                "cnb.forward_backward(model, loss_fn, torch.randn(8, 4), torch.randint(2, (8,)))")
    for code, name in (("optimizer.zero_", "zero_grad"), ("torch.nn.functional.cross_entr", "cross_entropy"),
                       ("from torch.nn import CrossE", "CrossEntropyLoss"), ("loss_fn.label_s", "label_smoothing")):
        assert [match.rpartition(".")[2] for match in notebook.matches(f"%%colossal\n{code}")] == [name]


def test_help_on_what_the_line_itself_says(notebook: Notebook) -> None:
    def shown(code: str, cursor: int, detail: int = 0) -> str:
        sent = notebook.client.inspect(code, cursor, detail)
        return str(notebook.answer(sent)["data"]["text/plain"])

    for cursor in (0, 4, 10):
        assert shown("%%colossal", cursor).startswith("Run a cell on the engines")
        assert shown("%%colossal tp=2\nx = 1", cursor, 1).startswith("Run a cell on the engines")
    assert shown("%colossal", 9).startswith("Look after the engines")
    assert "Example\n    %colossal push" in shown("x = 1\n%colossal push x", 18)
    here = notebook.inspect("x = 1\n%colossal push x", 22)
    assert not here["found"] or "Look after" not in here["data"]["text/plain"]


def test_a_space_that_is_none_to_ipython_is_one_to_us(notebook: Notebook) -> None:
    assert notebook.ok("%%colossal\u00a0dp=2\nprint(world_size)").stream() == "2\n"
    assert notebook.ok("%colossal\u00a0status").said.startswith("4 engines, ")
    assert notebook.matches("%colossal\u00a0st") == ["start", "status", "stop"]
    assert notebook.matches("%%colossal\u00a0sch") == ["schedule="]


def test_unloading_takes_back_what_loading_changed(notebook: Notebook) -> None:
    notebook.ok("shell = get_ipython()\ndef ours():\n    return (len(shell.input_transformers_cleanup), "
                "shell.debugger.__module__, len(shell.Completer.custom_matchers), shell.kernel.do_inspect.__module__)")
    loaded = notebook.value("ours()")
    notebook.ok("%unload_ext colossal_nb")
    unloaded = notebook.value("ours()")
    assert "colossal_nb" in loaded and "colossal_nb" not in unloaded
    assert notebook.run("%colossal").ename == "UsageError"
    notebook.ok("%load_ext colossal_nb")
    assert notebook.value("ours()") == loaded


def test_help(notebook: Notebook) -> None:
    assert "microbatches" in notebook.ok("%%colossal??").pages
    assert "def colossal" not in notebook.ok("??%colossal").pages
    assert "microbatches" in notebook.ok("%%colossal?").pages
    assert "%colossal VERB" in notebook.ok("%colossal?").pages
    assert "Example\n    %colossal push" in notebook.ok("%colossal push?").said
    assert "Example\n    %%colossal pp=2" in notebook.ok("%colossal help pp").said


def test_report(notebook: Notebook) -> None:
    notebook.ok("%%colossal\npass")
    assert notebook.ok("%colossal report").said.startswith("the last cell ran")


def test_export_writes_a_script(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok("%%colossal dp=2\nprint('trained', world_size)")
    path = tmp_path / "train.py"
    assert "torchrun --nproc-per-node 2" in notebook.ok(f"%colossal export {path}").said
    text = path.read_text()
    assert text.index('cnb.init("dp=2")') < text.index("print('trained', world_size)")
    path.write_text("mine")
    assert notebook.run(f"%colossal export {path}").ename == "ValueError"
    assert path.read_text() == "mine"


def test_export_says_which_other_cells_the_last_one_needs(notebook: Notebook, tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    notebook.ok("%%colossal dp=4\nlength = 99  # of another strategy")
    notebook.ok("%%colossal\nlength = 3")
    notebook.ok("%%colossal dp=2\nprint('length', length)")
    number = int(notebook.value("len(In) - 1")) - 1
    reply = notebook.run(f"%colossal export {path}")
    assert reply.ename == "ValueError" and not path.exists()
    wanted = f"%colossal export {path} --cells {number - 1},{number}"
    assert f"cell {number} reads length and does not define it" in reply.evalue and wanted in reply.evalue
    notebook.ok(wanted)
    assert "length = 3" in path.read_text() and "length = 99" not in path.read_text()


def test_a_name_that_only_the_ranks_have_is_told_where_it_lives(notebook: Notebook) -> None:
    notebook.ok("%%colossal\neach_has = 1\nif rank == 2: one_has = 2")
    reply = notebook.run("print(each_has)")
    assert reply.ename == "NameError"
    assert reply.said == "each_has lives on all ranks, not in the kernel: %colossal pull each_has"
    assert notebook.run("one_has").said.endswith("rank 2, not in the kernel: %colossal pull one_has --rank 2")
    assert notebook.run("nobody_has").said == ""
    assert notebook.run("%%colossal\nprint(nobody_has)").said == ""


@pytest.mark.parametrize("code", ["%load_ext colossal_nb", "%colossal status",
                                  "get_ipython().run_cell_magic('colossal', 'dp=2', 'pass')"])
def test_a_cell_on_a_rank_starts_no_ranks_of_its_own(notebook: Notebook, code: str) -> None:
    reply = notebook.run(f"%%colossal\n{code}")
    assert reply.ename == "UsageError" and "this cell already runs on a rank" in reply.evalue


def test_the_others_answer_what_is_typed_when_a_rank_does_not(notebook: Notebook) -> None:
    rows = [line.split() for line in notebook.ok("%colossal").said.splitlines() if line.endswith("ready")]
    frozen = int(rows[0][1])
    os.kill(frozen, signal.SIGSTOP)
    try:
        assert eventually(lambda: notebook.matches("%%colossal\nonly_on_r") == ["only_on_ranks"], 60)
        assert notebook.matches("%colossal pull only_on_r") == ["only_on_ranks"]
        assert notebook.run("only_on_ranks").said.startswith("only_on_ranks lives on ")
        assert "does not answer" in notebook.ok("%colossal").said
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert notebook.ok("%%colossal\nprint('x', rank)").stream().startswith("[0] x 0  (3 alike")
    assert "x 3" in notebook.ok("%%colossal --show all\nprint('x', rank)").stream()


def test_stop_leaves_nothing_and_the_next_cell_starts_anew(notebook: Notebook) -> None:
    pids = [int(line.split()[1]) for line in notebook.ok("%colossal").said.splitlines() if line.endswith("ready")]
    assert len(pids) == 4
    assert notebook.ok("%colossal stop").said == "stopped 4 engines"
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert notebook.ok("%colossal stop").said == "no engines run"
    assert notebook.ok("%%colossal tp=2\nprint(world_size)").stream() == "2\n"


@pytest.mark.parametrize("code", ["import colossal_nb", "import colossal_nb.notebook.magics, colossal_nb.session"])
def test_the_kernels_half_does_without_torch(code: str) -> None:
    run = f"{code}\nimport sys\nassert not {{'torch', 'pandas', 'ipyparallel.engine'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", run], check=True, timeout=60)
