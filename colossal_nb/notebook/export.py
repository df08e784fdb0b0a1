"""Cells as a plain script: the same code under torchrun, without a notebook."""
from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from IPython.core.inputtransformer2 import TransformerManager

from colossal_nb.notebook.names import GIVEN, binds, reads


@dataclass(frozen=True)
class ExportCell:
    """A cell by its number in the notebook; `source` is without its `%%colossal` line."""

    number: int
    source: str


def script(cells: Sequence[ExportCell], strategy: str, engines: int, name: str = "train.py") -> str:
    """The text of the script. ValueError with everything in the cells that only IPython can run."""
    wrong: list[str] = []
    bodies = [(cell, _plain(cell, wrong)) for cell in cells]
    if wrong:
        raise ValueError("\n".join(wrong))
    code = "\n\n".join(f"# cell {cell.number}\n{body}" for cell, body in bodies)
    code, futures = _hoisted(code)
    numbers = ", ".join(str(cell.number) for cell in cells)
    return f'''"""Cell{"s" * (len(cells) != 1)} {numbers} of a notebook, written by %colossal export. Run it with

    torchrun --nproc-per-node {engines} {name}
"""
{futures}import os
import sys

import colossal_nb as cnb

cnb.init("{strategy}")
{_given(code, strategy)}if int(os.environ.get("RANK", "0")):
    sys.stdout = open(os.devnull, "w")  # all ranks print the same: rank 0's output is enough

{code}
'''


def lacks(main: ExportCell, earlier: Sequence[ExportCell]) -> tuple[list[str], list[int]]:
    """Names that a cell reads and does not bind before, and the numbers of the earlier cells that give them.

    What those cells read themselves is looked for in the cells before them; the latest that binds a name gives it.
    """
    lacking = _needs(_plain(main, []))
    wanted, numbers = set(lacking), []
    for cell in reversed(earlier):
        body = _plain(cell, [])
        given = wanted & set(binds(body))
        if given:
            numbers.append(cell.number)
            wanted = wanted - given | set(_needs(body))
    return lacking, sorted(numbers)


def _needs(body: str) -> list[str]:
    """Names that the code reads from outside and that a script does not have by itself."""
    return [name for name in reads(body) if name not in GIVEN | {"cnb", "os", "sys"}]


def _hoisted(code: str) -> tuple[str, str]:
    """`from __future__` imports go to the top of a file."""
    found = re.findall(r"^from __future__ import .*$", code, flags=re.MULTILINE)
    code = re.sub(r"^from __future__ import .*\n?", "", code, flags=re.MULTILINE)
    return code, "".join(f"{line}\n" for line in dict.fromkeys(found)) + ("\n" if found else "")


def _given(code: str, strategy: str) -> str:
    """The names that cells find in a notebook, where the script reads them."""
    read = set(reads(code))
    lines = []
    if read & {"rank", "world_size", "mesh"}:
        lines.append('rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])')
    if "mesh" in read:
        lines.append(f'mesh = cnb.Strategy.parse("{strategy}").mesh(world_size)')
    if "display" in read:
        lines.append("display = print")
    return "".join(f"{line}\n" for line in lines)


def _plain(cell: ExportCell, wrong: list[str]) -> str:
    """The cell without IPython's own syntax: a line of it becomes a comment; what cannot go is added to `wrong`."""
    source = cell.source.strip("\n")
    first, _, rest = source.lstrip().partition("\n")
    if first.startswith("%%"):
        if re.match(r"%%(time|timeit|capture)\b", first):
            return f"# left out: {first}\n" + _plain(ExportCell(cell.number, rest), wrong)
        return "\n".join(f"# left out: {line}" for line in source.splitlines())
    code = TransformerManager().transform_cell(source)  # type: ignore[no-untyped-call, unused-ignore]
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        wrong.append(f"cell {cell.number}, line {error.lineno}: {error.msg}")
        return ""
    lines = code.rstrip("\n").split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and _is_ipython(node):
            _leave_out(node, lines)
    left = "\n".join(lines)
    for node in ast.walk(ast.parse(left)):
        if isinstance(node, ast.Name) and node.id == "get_ipython":
            wrong.append(f"cell {cell.number}, line {node.lineno}: only IPython can run "
                         f"{source.splitlines()[node.lineno - 1].strip()!r}; take it out of the cell")
        elif isinstance(node, ast.Await) and not _inside_function(ast.parse(left), node):
            wrong.append(f"cell {cell.number}, line {node.lineno}: a script has no await outside of a function")
    return left


def _is_ipython(node: ast.stmt) -> bool:
    """Whether a statement is a call `get_ipython().…(…)` and nothing else, as IPython's own syntax becomes."""
    call = node.value if isinstance(node, ast.Expr) else None
    return (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Call) and isinstance(call.func.value.func, ast.Name)
            and call.func.value.func.id == "get_ipython")


def _leave_out(node: ast.stmt, lines: list[str]) -> None:
    assert isinstance(node, ast.Expr)
    assert isinstance(node.value, ast.Call)
    assert isinstance(node.value.func, ast.Attribute)
    words = [str(argument.value) for argument in node.value.args if isinstance(argument, ast.Constant)]
    indent = " " * node.col_offset
    start, end = node.lineno - 1, node.end_lineno or node.lineno
    if node.value.func.attr == "run_line_magic" and words[:1] == ["time"] and len(words) > 1:
        text = f"{indent}{words[1]}"
    else:
        sign = {"run_line_magic": "%", "system": "!", "getoutput": "!!"}.get(node.value.func.attr, "")
        text = f"{indent}{'pass  ' if indent else ''}# left out: {sign}{' '.join(words).strip()}"
    lines[start:end] = [text, *[f"{indent}#"] * (end - start - 1)]


def _inside_function(tree: ast.AST, wanted: ast.Await) -> bool:
    return any(isinstance(each, ast.AsyncFunctionDef) and each.lineno <= wanted.lineno <= (each.end_lineno or 0)
               for each in ast.walk(tree))
