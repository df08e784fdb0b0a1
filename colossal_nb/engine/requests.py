"""What the kernel may ask of a rank between cells: names, push, pull, a copy of the globals for a new rank."""
from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from IPython.core.interactiveshell import InteractiveShell

from colossal_nb.cluster import parcel
from colossal_nb.engine.guard import GuardedPickler, IsParallel, is_parallel
from colossal_nb.parallel.report import whole_size

if TYPE_CHECKING:
    from colossal_nb.engine.cell import Cells

_SHELLS = re.compile(r"_+|_i+|_i?\d+|_exit_code|__\w*__")
"""Names that IPython and Python keep among the user's."""


class Requests:
    """Each verb is a method that takes the request's fields and returns the reply's."""

    def __init__(self, shell: InteractiveShell, cells: Cells) -> None:
        self._shell = shell
        self._cells = cells
        self._verbs: dict[str, Callable[..., dict[str, Any]]] = {
            "hello": dict, "names": self.names, "push": self.push, "pull": self.pull, "copy": self.copy,
            "lacking": self.lacking, "unreadable": self.unreadable}

    def answer(self, content: dict[str, Any]) -> dict[str, Any]:
        fields = {**content}
        try:
            return {"status": "ok", **self._verbs[fields.pop("verb")](**fields)}
        except Exception as error:
            return {"status": "error", "ename": type(error).__name__, "evalue": str(error)}

    def _all(self) -> dict[str, Any]:
        """The user's own names, and those that begin with an underscore."""
        ours = self._cells.defined
        hidden = self._shell.user_ns_hidden
        return {name: value for name, value in self._shell.user_ns.items()
                if not _SHELLS.fullmatch(name) and (name not in hidden or hidden[name] is not value)
                and not (name in ours and ours[name] is value)}

    def _own(self) -> dict[str, Any]:
        """The user's own names, as they are shown."""
        return {name: value for name, value in self._all().items() if not name.startswith("_")}

    def names(self) -> dict[str, Any]:
        """name -> what it is, in a few words."""
        return {"names": {name: describe(value) for name, value in self._own().items()}}

    def push(self, path: str) -> dict[str, Any]:
        """Bind names: (those to bind, those to bind where there are none of that name)."""
        names = self._shell.user_ns
        wanted, helping = parcel.read(path, names)
        names.update(wanted)
        for name, value in helping.items():
            names.setdefault(name, value)
        return {}

    def lacking(self, names: list[str]) -> dict[str, Any]:
        """Those of these names that this rank does not have."""
        return {"names": [name for name in names if name not in self._shell.user_ns]}

    def pull(self, name: str, path: str, as_numpy: bool) -> dict[str, Any]:
        """The value of a name (or of an expression) into the file `path`."""
        try:
            value = eval(name, self._shell.user_global_ns, self._shell.user_ns)
        except NameError:
            raise NameError(f"rank {self._cells.world.rank} has no {name!r}; it has: "
                            f"{', '.join(sorted(self._own())) or 'nothing'}") from None
        value = plain(value) if as_numpy else _detached(value)
        try:
            parcel.write(path, value, partial(_pickler, None, False))
        except IsParallel as error:
            verb = "is" if is_parallel(value) else "holds"
            raise ValueError(
                f"{name} {verb} a parallel model or optimizer: that has this rank's part and works on the ranks alone. "
                f"Take the whole weights in a cell of all ranks, whole = model.state_dict(), then %colossal pull whole"
            ) from error
        return {"what": describe(value)}

    def copy(self, path: str, without: Sequence[str] = (), apart: bool = False) -> dict[str, Any]:
        """By-value copies of the picklable globals into `path`; the rest is named with the reason.

        Functions of cells come without their globals: those of the rank that reads them take their place.
        `apart`: each on its own, for `unreadable`.
        """
        values, missing = {name: value for name, value in self._all().items() if name not in without}, {}
        pickler = partial(_pickler, self._shell.user_global_ns, True)
        try:
            parcel.write(path, (values, {}), pickler)  # together: what is shared stays shared
        except Exception:
            for name in list(values):
                try:
                    parcel.needs(values[name], pickler)
                except Exception as error:
                    missing[name] = _reason(values[name], error)
                    del values[name]
            parcel.write(path, (values, {}), pickler)
        if apart:
            parcel.write_each(path, values.values(), pickler)
        return {"names": list(values), "missing": missing}

    def unreadable(self, path: str, names: list[str]) -> dict[str, Any]:
        """Which of the copies in `path`, each on its own, cannot be read on this rank."""
        failed = parcel.unreadable(path, names, self._shell.user_ns)
        return {"missing": {name: _reason(None, error) for name, error in failed.items()}}


def _pickler(namespace: dict[str, Any] | None, tensors: bool, file: Any, take: Any) -> GuardedPickler:
    return GuardedPickler(file, namespace, take, tensors)


def _reason(value: Any, error: Exception) -> str:
    if isinstance(error, IsParallel):
        return "is parallel" if is_parallel(value) else "holds something parallel"
    return f"cannot be copied ({type(error).__name__})"


def plain(value: Any) -> Any:
    """The same with numpy arrays for tensors, in containers too, for a kernel without torch."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(plain(each) for each in value)
    return value


def _detached(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def describe(value: Any) -> str:
    """A few words on a value, without computing anything."""
    if isinstance(value, torch.Tensor):
        kind = "Parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
        return f"{kind} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}" + _parallel(value)
    if isinstance(value, np.ndarray):
        return f"array {list(value.shape)} {value.dtype}"
    if isinstance(value, torch.nn.Module):
        return f"{type(value).__name__} with {whole_size(value):,} parameters" + _parallel(value)
    if isinstance(value, torch.optim.Optimizer):
        return type(value).__name__ + _parallel(value)
    if isinstance(value, types.ModuleType):
        return "module"
    if isinstance(value, (type, types.FunctionType)):
        return "class" if isinstance(value, type) else "function"
    if isinstance(value, (bool, int, float, complex, type(None))) or (isinstance(value, str) and len(value) < 40):
        return f"{type(value).__name__} {value!r}"
    try:
        return f"{type(value).__name__} of {len(value)}"
    except TypeError:
        return f"{type(value).__name__}, {sys.getsizeof(value)} bytes"


def _parallel(value: Any) -> str:
    return ", parallel" if is_parallel(value) else ""
