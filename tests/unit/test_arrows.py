"""Which room of the house may import which, and which third party may enter where."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "colossal_nb"

# Room -> the other rooms it may import. A room is a package or module directly below colossal_nb.
ARROWS = {
    "record": set(),
    "validation": set(),
    "plan": {"record", "validation"},
    "checks": {"plan", "record"},
    "parallel": {"plan", "record", "validation"},
    "engine": {"parallel", "plan", "record", "cluster"},
    "cluster": {"record"},
    "run": {"cluster", "plan", "record"},
    "session": {"cluster", "plan", "record", "run"},
    "views": {"plan", "record", "checks"},
    "notebook": {"cluster", "plan", "record", "checks", "run", "session", "views", "models", "corpus"},
    "models": {"validation"},
    "corpus": {"validation"},
}
# Third party -> the rooms it may enter.
GUESTS = {
    "torch": {"parallel", "engine", "models", "corpus"},
    "IPython": {"notebook", "engine"},
    "ipykernel": {"notebook", "engine"},
    "zmq": {"cluster", "engine", "session", "run"},
    "ipyparallel": {"cluster", "engine", "session", "run"},
    "sklearn": {"corpus"},
}
# Rooms that stay small on purpose: everything they may import beside the standard library and ours.
FRUGAL = {"record": {"numpy", "pandas"}, "plan": {"numpy"}, "run": {"numpy", "pandas"}, "models": {"torch"}}
# Sibling packages of parallel that speak through the layouts on parameters, never to each other.
STRANGERS = ("tensor", "sequence", "pipeline", "zero")


def imported(source: str, module: str, *, is_package: bool) -> set[str]:
    """Absolute names of all modules that `source`, the text of `module`, imports anywhere, also inside functions."""
    names: set[str] = set()
    parents = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{start}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            names.update(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
    return names


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """The forbidden imports of one module below colossal_nb."""
    path = module.split(".")
    room = path[1]
    found = []
    for name in sorted(imported(source, module, is_package=is_package)):
        top, *below = name.split(".")
        if top == "colossal_nb":
            other = below[0] if below else ""
            if other in ARROWS and other != room and other not in ARROWS[room]:
                found.append(f"{module}: {room} may not import {other}")
            both_inside = room == other == "parallel" and len(path) > 2 and len(below) > 1
            if both_inside and path[2] in STRANGERS and below[1] in STRANGERS and path[2] != below[1]:
                found.append(f"{module}: {path[2]} and {below[1]} never import each other")
        elif top in GUESTS and room not in GUESTS[top]:
            found.append(f"{module}: {top} may not enter {room}")
        elif room in FRUGAL and top not in FRUGAL[room] and top not in sys.stdlib_module_names:
            found.append(f"{module}: {room} does without {top}")
    return found


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def test_every_module_keeps_the_arrows():
    rooms = {name.split(".")[1] for name, _ in modules() if "." in name}
    assert rooms <= set(ARROWS), f"a new room needs its arrows here: {sorted(rooms - set(ARROWS))}"
    found = []
    for name, path in modules():
        if "." in name:  # colossal_nb/__init__ alone may know every room: it loads each at first use
            found += violations(path.read_text(), name, is_package=path.name == "__init__.py")
    assert found == []


def test_every_module_of_the_house_is_read():
    assert len(modules()) == len(list(PACKAGE.rglob("*.py"))) > 10


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("colossal_nb.record.store", "from colossal_nb.plan import Mesh", "record may not import plan"),
        ("colossal_nb.record.store", "from ..plan import mesh", "record may not import plan"),
        ("colossal_nb.record.store", "from .. import plan", "record may not import plan"),
        ("colossal_nb.plan.mesh", "def f():\n    import torch", "torch may not enter plan"),
        ("colossal_nb.plan.mesh", "import scipy.stats", "plan does without scipy"),
        ("colossal_nb.notebook.magics", "from colossal_nb.parallel.world import World", "not import parallel"),
        ("colossal_nb.notebook.x", "import importlib\nimportlib.import_module('torch')", "torch may not"),
        ("colossal_nb.session", "from IPython import get_ipython", "IPython may not enter session"),
        ("colossal_nb.parallel.step", "import zmq", "zmq may not enter parallel"),
        ("colossal_nb.parallel.tensor.apply", "from ..pipeline import apply", "tensor and pipeline never"),
        ("colossal_nb.parallel.tensor.apply", "import colossal_nb.parallel.zero.shard", "tensor and zero never"),
        ("colossal_nb.cluster.supervisor", "import colossal_nb.engine.fork", "cluster may not import engine"),
    ],
)
def test_a_planted_import_is_found(module, source, words):
    assert words in "\n".join(violations(source, module))


def test_allowed_imports_are_left_alone():
    assert violations("import torch\nfrom ..plan import Mesh\nfrom . import world", "colossal_nb.parallel.step") == []
    assert violations("from .mesh import Mesh\nimport math", "colossal_nb.plan", is_package=True) == []
    assert violations("from ..layouts import layout_of", "colossal_nb.parallel.tensor.apply") == []
