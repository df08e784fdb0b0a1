"""Size of the code: files, lines, the largest file and function. Ends with status 1 where a limit is passed.

A file may have 500 lines (300 is the aim), tests included. Run from the root: python tools/size_report.py [FOLDER ...]
"""

import ast
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

HARD_LIMIT = 500
AIM = 300
FOLDERS = ("colossal_nb", "tests", "benchmarks", "tools")


@dataclass(frozen=True)
class Sized:
    """Something with a name and a number of lines."""

    name: str
    lines: int


def files(root: Path) -> list[Sized]:
    """Every Python file below `root`, with its number of lines."""
    return [Sized(str(path), len(path.read_text().splitlines())) for path in sorted(root.rglob("*.py"))]


def functions(root: Path) -> list[Sized]:
    """Every function and method below `root`, with the lines from `def` to its end."""
    found = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                found.append(Sized(f"{path}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1))
    return found


def report(root: Path) -> tuple[str, list[Sized]]:
    """The text of the report and the files that pass the hard limit."""
    all_files, all_functions = files(root), functions(root)
    if not all_files:
        raise ValueError(f"no Python file below {root}: run from the root of the repository")
    lines = [
        f"{root}: {len(all_files)} files, {sum(f.lines for f in all_files)} lines, {len(all_functions)} functions, "
        f"median function {statistics.median([f.lines for f in all_functions] or [0]):g} lines"
    ]
    for what, sized in (("largest file", all_files), ("largest function", all_functions)):
        if sized:
            largest = max(sized, key=lambda one: one.lines)
            lines.append(f"{what}: {largest.lines} lines, {largest.name}")
    above_aim = [f for f in all_files if f.lines > AIM]
    if above_aim:
        lines.append(f"above the aim of {AIM} lines: " + ", ".join(f"{f.name} ({f.lines})" for f in above_aim))
    return "\n".join(lines), [f for f in all_files if f.lines > HARD_LIMIT]


def main(arguments: list[str]) -> int:
    """Print a report for each folder; 1 if a file is too long."""
    status = 0
    for folder in arguments or FOLDERS:
        text, too_long = report(Path(folder))
        print(text)
        for one in too_long:
            print(f"{one.name} has {one.lines} lines, the limit is {HARD_LIMIT}: split it where one idea ends")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
