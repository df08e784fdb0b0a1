"""Plain values as JSON and back: numbers, strings, lists, tuples, sets, dicts, tensors. Nothing is ever unpickled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel.layouts import layout_of

_MARK = "~"
_DEEPEST = 100
_ALLOWED = "tensors, numbers, strings, True, False, None, and lists, tuples, sets and dicts of these"
_SEQUENCES: dict[str, type[list[Any] | tuple[Any, ...] | set[Any]]] = {"~tuple": tuple, "~set": set}
Keep = Callable[[Tensor], str]
"""Takes a tensor that is stored elsewhere and gives its name there."""


def encode(value: Any, where: str, keep: Keep, depth: int = 0) -> Any:
    """What `json` can write. Raises ValueError that names the place (`where`) of a value of another kind."""
    if depth > _DEEPEST:
        raise ValueError(
            f"{where[: where.find('[')]} contains itself, or is nested more than {_DEEPEST} levels deep, which a "
            "checkpoint does not hold: give its parts by names of their own"
        )
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, keep)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, keep, depth)
    if isinstance(value, list | tuple | set | frozenset):
        parts = [encode(part, f"{where}[{number}]", keep, depth + 1) for number, part in enumerate(value)]
        if isinstance(value, list):
            return parts
        return {"~tuple" if isinstance(value, tuple) else "~set": parts}
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:  # a number of numpy's
        return encode(item(), where, keep)
    hint = "torch.from_numpy(it)" if type(value).__module__ == "numpy" else "its own plain values"
    raise ValueError(
        f"{where} is a {type(value).__name__}, which a checkpoint does not hold: it holds {_ALLOWED}, and what has "
        f"state_dict(); give {hint}"
    )


def _encode_tensor(value: Tensor, where: str, keep: Keep) -> Any:
    layout = layout_of(value)
    if layout is not None and layout.mesh.size > 1:
        raise ValueError(f"{where} is a parameter of which each rank holds a part: give cnb.full(it)")
    if value.layout != torch.strided or value.is_quantized:
        raise ValueError(f"{where} is a sparse or quantized tensor, which a checkpoint does not hold: give a dense one")
    if value.dim() == 0 and not value.is_complex():
        return {"~number": [str(value.dtype).removeprefix("torch."), value.item()]}
    return {"~tensor": keep(value.detach())}


def _encode_mapping(value: Mapping[Any, Any], where: str, keep: Keep, depth: int) -> Any:
    parts = [(key, encode(part, f"{where}[{key!r}]", keep, depth + 1)) for key, part in value.items()]
    if isinstance(value, Counter):
        return {"~counter": [[encode(key, where, keep), part] for key, part in parts]}
    if all(isinstance(key, str) and not key.startswith(_MARK) for key, _ in parts):
        return dict(parts)
    return {"~items": [[encode(key, where, keep), part] for key, part in parts]}


def decode(plain: Any, fetch: Callable[[str], Tensor]) -> Any:
    """The value that `encode` wrote; `fetch(name)` gives a stored tensor."""
    if isinstance(plain, list):
        return [decode(part, fetch) for part in plain]
    if not isinstance(plain, dict):
        return plain
    mark = next(iter(plain), "")
    if not mark.startswith(_MARK):
        return {key: decode(part, fetch) for key, part in plain.items()}
    held = plain[mark]
    if mark == "~tensor":
        return fetch(held)
    if mark == "~number":
        return torch.tensor(held[1], dtype=dtype(held[0]))
    if mark in _SEQUENCES:
        return _SEQUENCES[mark](decode(part, fetch) for part in held)
    pairs = {decode(key, fetch): decode(part, fetch) for key, part in held}
    return Counter(pairs) if mark == "~counter" else pairs


def stored(plain: Any) -> list[str]:
    """The names of the tensors in an encoded value."""
    if isinstance(plain, list):
        return [name for part in plain for name in stored(part)]
    if not isinstance(plain, dict):
        return []
    if "~tensor" in plain:
        return [plain["~tensor"]]
    return [name for part in plain.values() for name in stored(part)]


def dtype(name: str) -> torch.dtype:
    """torch's dtype of a name such as float32."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"the checkpoint holds a tensor of dtype {name!r}, which torch {torch.__version__} has not")
    return found
