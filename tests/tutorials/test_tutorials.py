"""Every lesson runs from its first cell to its last through a real kernel; its claims are assertions in its cells."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import jupytext
import nbformat
import pytest
import run_tutorial

ROOT = Path(__file__).parents[2]
LESSONS = sorted((ROOT / "tutorials").glob("*.md"))


def code(lesson: Path) -> list[str]:
    return [cell.source for cell in jupytext.read(lesson, fmt="md:myst").cells if cell.cell_type == "code"]


def test_there_are_lessons():
    assert [lesson.name for lesson in LESSONS][:1] == ["01-a-cluster-in-a-cell.md"]


def test_the_first_lesson_runs_one_cell_under_every_strategy():
    """The bodies of the training cells are the same characters; only the magic line differs."""
    cells = [source for source in code(LESSONS[0]) if "losses.append" in source]
    lines = [source.splitlines()[0] if source.startswith("%%") else "" for source in cells]
    bodies = {source.split("\n", 1)[1] if source.startswith("%%") else source for source in cells}
    assert len(bodies) == 1
    assert [line.removeprefix("%%colossal ").split(" --out")[0] for line in lines] == [
        "", "dp=4", "tp=4", "pp=4", "tp=2 pp=2 microbatches=4", "dp=2 tp=2", "dp=2 tp=2 pp=2",
    ]  # fmt: skip


def test_the_readme_shows_the_cell_of_the_first_lesson():
    readme = (ROOT / "README.md").read_text()
    shown = readme.split("```python\n%%colossal")[1].split("```")[0].split("\n", 1)[1]
    assert ast.parse(shown)
    for line in ("cnb.parallelize(model, optimizer)", "cnb.forward_backward(model, loss_fn, inputs, targets)"):
        assert line in shown
        assert all(line in source for source in code(LESSONS[0]) if "losses.append" in source)


@pytest.mark.kernel
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_lesson_runs(lesson, tmp_path, capfd):
    status = run_tutorial.main([str(lesson), "--out", str(tmp_path)])
    shown = capfd.readouterr()
    assert status == 0, shown.out + shown.err
    executed = nbformat.read(tmp_path / f"{lesson.stem}.ipynb", as_version=4)
    nbformat.validate(executed)
    ran = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in ran] == list(range(1, len(ran) + 1))
    page = (tmp_path / f"{lesson.stem}.html").read_text()
    assert executed.cells[0].source.splitlines()[0].removeprefix("# ") in page
    assert f"[{len(ran):2}/{len(ran)}]" in shown.out


def test_a_claim_that_fails_ends_the_run_and_is_written(tmp_path, capfd):
    lesson = tmp_path / "wrong.md"
    cell = "```{{code-cell}} ipython3\n{}\n```\n\n"
    lesson.write_text("# Wrong\n\n" + cell.format("assert 1 + 1 == 3, 'it is not'") + cell.format("x = 1"))
    assert run_tutorial.main([str(lesson), "--out", str(tmp_path / "out")]) == 1
    shown = capfd.readouterr()
    assert "FAILED" in shown.out
    assert "it is not" in shown.err
    executed = nbformat.read(tmp_path / "out" / "wrong.ipynb", as_version=4)
    assert executed.cells[1].outputs[0].ename == "AssertionError"
    assert executed.cells[2].execution_count is None


def test_what_ran_before_a_stop_is_written_and_said_where(tmp_path):
    cell = "```{{code-cell}} ipython3\n{}\n```\n\n"
    (tmp_path / "long.md").write_text(
        cell.format("print('first')") + cell.format("open('there', 'w').close(); __import__('time').sleep(600)")
    )
    command = [sys.executable, run_tutorial.__file__, str(tmp_path / "long.md"), "--out", str(tmp_path)]
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not (tmp_path / "there").exists() and time.monotonic() < end:
        time.sleep(0.1)
    ran.terminate()
    out, said = ran.communicate(timeout=60)
    assert ran.returncode == 1
    assert "KeyboardInterrupt" in said
    assert "nbclient" not in said
    assert f"Executed up to there: {tmp_path / 'long.ipynb'}" in out
    first, stopped = nbformat.read(tmp_path / "long.ipynb", as_version=4).cells
    assert first.outputs[0].text == "first\n"
    assert stopped.outputs[0].ename == "KeyboardInterrupt"
