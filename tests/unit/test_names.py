"""Names that a cell needs from outside."""
from __future__ import annotations

import pytest

from colossal_nb.notebook.names import binds, missing, reads


@pytest.mark.parametrize("source, needed", [
    ("x = 1\nprint(x)", []),
    ("print(x)\nx = 1", ["x"]),
    ("x = x + 1", ["x"]),
    ("x += 1", ["x"]),
    ("import torch, numpy as np\ntorch.zeros(n); np.ones(n)", ["n"]),
    ("from a import b as c\nc(b)", ["b"]),
    ("def f(a, *b, c=d, **e):\n    t = a + b + c + e\n    return g(t)", ["d", "g"]),
    ("def f():\n    return later\nlater = 1\nf()", []),
    ("def f():\n    global made\n    made = 1\nf()\nprint(made)", []),
    ("f = lambda x: x + y", ["y"]),
    ("[i * k for i in items if i]", ["items", "k"]),
    ("{a: b for a, b in pairs.items()}\nprint(a)", ["pairs", "a"]),
    ("for i, (a, b) in enumerate(data):\n    print(i, a, b, c)", ["data", "c"]),
    ("with open(path) as file:\n    file.read()", ["path"]),
    ("class Net(Base):\n    size = n\n    def forward(self, x):\n        return self.f(x) + k", ["Base", "n", "k"]),
    ("try:\n    x = value\nexcept ValueError as error:\n    print(error)", ["value"]),
    ("try:\n    value\nexcept NameError:\n    value = 1\nprint(value)", []),
    ("if a:\n    b = 1\nprint(b)", ["a"]),
    ("while (line := read()):\n    print(line)", ["read"]),
    ("match thing:\n    case {'x': x, **rest}: print(x, rest)\n    case [1, *more]: print(more)", ["thing"]),
    ("def outer():\n    n = 1\n    def inner():\n        return n + m\n    return inner", ["m"]),
    ("@decorate\ndef f(x: kind) -> kind: ...", ["decorate"]),
    ("count: int\nprint(count)", ["int", "count"]),
    ("del model", ["model"]),
    ("def broken(:", []),
    ("from a import *\nx", []),
    ("exec(code)\nx", []),
    ("def f():\n    globals()['x'] = 1\nf()\nx", []),
    ("get_ipython().run_line_magic('run', 'a.py')\nx", []),
])  # fmt: skip
def test_reads(source: str, needed: list[str]) -> None:
    known = {"print", "open", "enumerate", "ValueError", "NameError"}
    assert [name for name in reads(source) if name not in known] == needed


def test_binds() -> None:
    assert binds("import a.b\nx = 1\ndef f(): y = 2\nfor i in z: pass\nclass C: q = 1") == ["C", "a", "f", "i", "x"]


def test_missing_are_those_we_have_and_they_lack() -> None:
    here = {"batch": 1, "np": 2, "rank": 3, "_": 4, "torch": 5}
    assert missing("np.sum(batch); torch.zeros(rank); print(_, unknown)", here, {"torch"}) == ["np", "batch"]
