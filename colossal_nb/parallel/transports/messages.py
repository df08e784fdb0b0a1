"""One tensor from one rank to another, with what is sent and what is expected compared before a byte of it moves.

On top of a transport's raw `send` and `recv`: a header travels first. A careful sender waits for the receiver's
answer, so that a mismatch raises on both sides with both shapes in the text and a send is not over before its receive
has begun; an eager one lets the tensor follow at once, and a mismatch raises at the receiver only.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel.transports.gloo import Gloo, Handle

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_MOST_DIMS = 12
_CAREFUL, _EAGER = 0, 1
# Three conversations per tag of the user.
_HEADER, _BODY, _ANSWER = 0, 1, 2


class Mismatch(ValueError):
    """A send and its receive name different shapes or dtypes."""


@dataclass(frozen=True)
class _Header:
    manner: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def packed(self) -> Tensor:
        room = [0] * (_MOST_DIMS - len(self.shape))
        return torch.tensor([self.manner, _DTYPES.index(self.dtype), len(self.shape), *self.shape, *room])

    @staticmethod
    def unpacked(packed: Tensor) -> "_Header":
        manner, dtype, dims, *sizes = packed.tolist()
        return _Header(manner, _DTYPES[dtype], tuple(sizes[:dims]))

    def fits(self, other: "_Header") -> bool:
        """Same dtype and as many elements: what torch allows; the receiver's shape is its own business."""
        return self.dtype == other.dtype and torch.Size(self.shape).numel() == torch.Size(other.shape).numel()

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def _header(x: Tensor, manner: int) -> _Header:
    if x.dtype not in _DTYPES or x.dim() > _MOST_DIMS:
        raise ValueError(f"cannot send a tensor of {x.dtype} with {x.dim()} dims: at most {_MOST_DIMS} dims")
    return _Header(manner, x.dtype, tuple(x.shape))


def _room() -> Tensor:
    return torch.zeros(3 + _MOST_DIMS, dtype=torch.int64)


def _refuse(sent: _Header, expected: _Header, source: str, target: str) -> Mismatch:
    return Mismatch(f"{source} sends {sent}, {target} expects {expected}: nothing was transferred")


def send_eager(wire: Gloo, x: Tensor, peer: int, tag: int) -> list[Handle]:
    """Header and tensor are on their way; the memory of `x` must stay as it is until the handle is waited for."""
    header = wire.send(_header(x, _EAGER).packed(), peer, 3 * tag + _HEADER)
    return [wire.sent(header, wire.send(x.contiguous(), peer, 3 * tag + _BODY))]


def send(wire: Gloo, x: Tensor, peer: int, tag: int, names: tuple[int, ...], index: int) -> None:
    """Send after the receiver agreed; returns when the receiver has taken it. Raises `Mismatch`.

    `names` are the global ranks of the group's members, for the texts.
    """
    header, answer = _header(x, _CAREFUL), _room()
    first = wire.send(header.packed(), peer, 3 * tag + _HEADER)
    wire.recv(answer, peer, 3 * tag + _ANSWER).wait()
    first.wait()  # the answer proves that it is through
    expected = _Header.unpacked(answer)
    if not header.fits(expected):
        raise _refuse(header, expected, f"rank {names[index]}", f"rank {names[peer]}")
    wire.sent(wire.send(x.contiguous(), peer, 3 * tag + _BODY)).wait()


def recv(wire: Gloo, x: Tensor, peer: int | None, tag: int, names: tuple[int, ...], index: int) -> int:
    """Receive into `x`; returns the sender's index (`peer` None: whoever comes first). Raises `Mismatch`."""
    packed = _room()
    handle: Any = wire.recv(packed, peer, 3 * tag + _HEADER)
    handle.wait()
    source = handle._source_rank() if peer is None else peer
    sent, expected = _Header.unpacked(packed), _header(x, _CAREFUL)
    answer = wire.send(expected.packed(), source, 3 * tag + _ANSWER) if sent.manner == _CAREFUL else None
    if not sent.fits(expected):
        if answer is not None:
            wire.sent(answer).wait()
        raise _refuse(sent, expected, f"rank {names[source]}", f"rank {names[index]}")
    room = x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
    wire.recv(room, source, 3 * tag + _BODY).wait()
    if answer is not None:
        answer.wait()  # the tensor proves that it is through
    if room is not x:
        x.copy_(room)
    return source
