"""Which names a cell reads before it binds them, and which it binds: to say what the ranks lack before they run it."""
from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterable, Mapping

GIVEN = frozenset(dir(builtins)) | {"rank", "world_size", "mesh", "get_ipython", "display", "In", "Out", "__file__"}
"""Names that every rank has."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def reads(source: str) -> list[str]:
    """Names that the code needs from outside, in the order in which it reads them.

    None if it does not parse, or binds names that nobody can see (`import *`, `exec`, `globals()`, `%run`).
    """
    scope = _read(source)
    return list(scope.needed) if scope and not scope.veiled else []


def binds(source: str) -> list[str]:
    """Names that the code binds at its top level."""
    scope = _read(source)
    return sorted(scope.bound) if scope else []


def missing(source: str, here: Mapping[str, object], there: Collection[str]) -> list[str]:
    """Names that the code reads, that we have here and they lack there."""
    return [name for name in candidates(source, here) if name not in there]


def candidates(source: str, here: Mapping[str, object]) -> list[str]:
    """Names that the code reads and that we have here."""
    return [name for name in reads(source) if name in here and name not in GIVEN and not name.startswith("_")]


def _read(source: str) -> _Scope | None:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    scope = _Scope()
    scope.visit(tree)
    scope.need(name for name in scope.later if name not in scope.bound)
    return scope


class _Scope(ast.NodeVisitor):
    """Walks code in the order in which it runs. A name bound in any branch counts as bound."""

    def __init__(self, bound: Iterable[str] = ()) -> None:
        self.bound = set(bound)
        self.needed: dict[str, None] = {}
        self.later: dict[str, None] = {}  # read by functions, which run when everything is bound
        self.veiled = False  # names may be bound that the code does not show

    def need(self, names: Iterable[str]) -> None:
        self.needed.update(dict.fromkeys(name for name in names))

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
        elif node.id not in self.bound:
            self.need([node.id])

    def visit_Assign(self, node: ast.Assign) -> None:
        self._in_order(node.value, *node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._in_order(node.annotation, node.value, node.target)
        else:
            self.visit(node.annotation)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and node.target.id not in self.bound:
            self.need([node.target.id])
        self._in_order(node.value, node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._in_order(node.value, node.target)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._in_order(node.iter, node.target, *node.body, *node.orelse)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self.visit_For(node)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        self.veiled |= any(alias.name == "*" for alias in node.names)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        magic = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
        self.veiled |= called in ("exec", "globals") or (magic == "run_line_magic" and first in ("run", "pylab"))
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.visit_Import(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._in_order(*node.decorator_list)
        self._function(node)
        self.bound.add(node.name)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._in_order(*node.decorator_list, *node.bases, *node.keywords)
        inside = _Scope(self.bound)
        inside._in_order(*node.body)
        self._take(inside)
        self.bound.add(node.name)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._comprehension(node)

    def _comprehension(self, node: _Comprehension) -> None:
        inside = _Scope(self.bound)
        for generator in node.generators:
            inside._in_order(generator.iter, generator.target, *generator.ifs)
        inside._in_order(*([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]))
        self._take(inside)

    def visit_Try(self, node: ast.Try) -> None:
        guarded = any(handler.type is None or _catches_name_error(handler.type) for handler in node.handlers)
        inside = _Scope(self.bound)
        inside._in_order(*node.body)
        self.bound |= inside.bound
        if not guarded:
            self._take(inside)
        self._in_order(*node.handlers, *node.orelse, *node.finalbody)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.bound.update([node.name] if node.name else [])
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.bound.update([node.name] if node.name else [])
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self.bound.update([node.name] if node.name else [])

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.bound.update([node.rest] if node.rest else [])
        self.generic_visit(node)

    def _in_order(self, *nodes: ast.AST | None) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def _take(self, inside: _Scope) -> None:
        self.veiled |= inside.veiled
        self.need(inside.needed)
        self.later.update(inside.later)

    def _function(self, node: _Function) -> None:
        arguments = node.args
        self._in_order(*arguments.defaults, *arguments.kw_defaults)
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        named += [each for each in (arguments.vararg, arguments.kwarg) if each]
        inside = _Scope(each.arg for each in named)
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        inside._in_order(*body)
        self.veiled |= inside.veiled
        outer = {name for each in body for found in ast.walk(each) if isinstance(found, ast.Global)
                 for name in found.names}
        read = [*inside.needed, *(name for name in inside.later if name not in inside.bound)]
        local = inside.bound - outer
        self.later.update(dict.fromkeys(name for name in read if name not in local))
        self.bound |= outer & inside.bound


def _catches_name_error(node: ast.expr) -> bool:
    return any(isinstance(each, ast.Name) and each.id in ("NameError", "Exception", "BaseException")
               for each in ast.walk(node))
