"""Cells as a script: what IPython alone can run is left out or refused."""
from __future__ import annotations

import ast

import pytest

from colossal_nb.notebook.export import ExportCell, lacks, script


def body(*sources: str) -> str:
    text = script([ExportCell(i + 3, source) for i, source in enumerate(sources)], "tp=2", 2)
    ast.parse(text)
    return text


def test_the_strategy_comes_first_then_the_cells() -> None:
    text = body("import torch\nx = 1", "print(x)")
    parts = ["torchrun --nproc-per-node 2 train.py", "import colossal_nb as cnb", 'cnb.init("tp=2")',
             "# cell 3\nimport torch", "x = 1", "# cell 4\nprint(x)"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.parametrize("line", ["%matplotlib inline", "!pip list", "%load_ext colossal_nb", "x?", "%colossal status"])
def test_lines_of_ipython_become_comments(line: str) -> None:
    text = body(f"x = 1\n{line}\ny = 2")
    assert "# left out: " in text and "x = 1" in text and "y = 2" in text
    assert "get_ipython" not in text


def test_inside_a_block_too() -> None:
    assert "if True:\n    pass  # left out: !ls" in body("if True:\n    !ls")


def test_time_keeps_the_statement() -> None:
    assert "\nx = f()\n" in body("def f(): return 1\n%time x = f()")
    assert "# left out: %%time\nx = 1" in body("%%time\nx = 1")


def test_cells_of_other_languages_become_comments() -> None:
    assert "# left out: %%bash\n# left out: ls" in body("%%bash\nls")


def test_percent_and_exclamation_marks_in_python_stay() -> None:
    source = 's = """\n%not magic\n!nor this\n"""\nx = 5 % 3\ny = x != 2'
    assert source in body(source)


def test_what_a_script_cannot_do_is_refused_all_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        body("x = 1\nfiles = !ls", "import asyncio\nawait asyncio.sleep(0)", "def broken(:")
    said = str(caught.value).splitlines()
    assert said[0] == "cell 3, line 2: only IPython can run 'files = !ls'; take it out of the cell"
    assert said[1] == "cell 4, line 2: a script has no await outside of a function"
    assert said[2].startswith("cell 5, line 1: ")


def test_await_inside_a_function_stays() -> None:
    assert "await g()" in body("async def f():\n    await g()")


def test_future_imports_come_first() -> None:
    text = body("x = 1", "from __future__ import annotations\ny = 2")
    assert text.index("from __future__") < text.index("import os")
    assert text.count("from __future__") == 1


def test_names_that_cells_are_given_are_defined_where_read() -> None:
    assert "rank, world_size = " in body("print(rank)")
    assert "mesh = cnb.Strategy" in body("print(mesh)")
    assert "world_size" not in body("print(1)")


def cells(*sources: str) -> list[ExportCell]:
    return [ExportCell(i + 1, source) for i, source in enumerate(sources)]


def test_a_cell_that_defines_what_it_reads_lacks_nothing() -> None:
    *earlier, main = cells("x = 1", "import os, colossal_nb as cnb\nx = 2\nprint(x, rank, os.sep, cnb.Strategy)")
    assert lacks(main, earlier) == ([], [])
    assert lacks(ExportCell(2, "print(cnb.Strategy, os.sep, sys.path, mesh)"), earlier) == ([], [])


def test_the_latest_cells_that_give_a_name_are_found_and_what_those_need() -> None:
    *earlier, main = cells("base = 2", "unused = 3", "data = [0]", "data = [base]\n%time width = 4", "data += [5]",
                           "def late(): return data\nprint(late(), width)")
    lacking, numbers = lacks(main, earlier)
    assert sorted(lacking) == ["data", "width"]
    assert numbers == [1, 4, 5]


def test_names_that_no_cell_gives_are_named_without_numbers() -> None:
    assert lacks(ExportCell(2, "print(pushed)"), cells("x = 1")) == (["pushed"], [])
