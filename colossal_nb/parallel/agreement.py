"""Before a collective runs: do all ranks of the group mean the same one?

Gloo does not ask. A size that differs ends a rank's process (`EnforceNotMet`), a smaller broadcast silently fills a
part, two different operations wait for each other for ever. So each rank first tells every other what it is about to
do, in a block of some 200 bytes, and raises where they differ.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from colossal_nb.parallel.calls import Call
from colossal_nb.parallel.forms import describe
from colossal_nb.parallel.transports.gloo import Gloo
from colossal_nb.parallel.transports.messages import Mismatch

_DIGEST, _TEXT = 8, 136
_MOST_TENSORS_SHOWN = 4


@dataclass(frozen=True)
class Signature:
    """What must be alike on all ranks (`alike`) and, between two ranks, what one gives and the other takes."""

    op: str
    detail: str
    alike: tuple[tuple[torch.dtype, int], ...]
    got: tuple[int, ...]
    given: tuple[int, ...]


def signature(op: str, call: Call) -> Signature:
    alike = tuple([(each.dtype, each.numel()) for each in call.compared])
    return Signature(op, call.detail, alike, tuple(call.got), tuple(call.given))


def block_bytes(size: int) -> int:
    """Length of a block in a group of `size` ranks."""
    return _DIGEST + _TEXT + 16 * size


def block(mine: Signature, call: Call, size: int) -> bytes:
    """What the others must know of a call: a digest of what is to be alike, its text, elements taken and given."""
    digest = hashlib.blake2b(repr((mine.op, mine.detail, mine.alike)).encode(), digest_size=_DIGEST).digest()
    text = _shown(mine, call).encode()[:_TEXT].ljust(_TEXT, b"\0")
    numbers = [*(mine.got or [0] * size), *(mine.given or [0] * size)]
    return digest + text + struct.pack(f"<{2 * size}q", *numbers)


def exchanged(wire: Gloo, mine: bytes, size: int) -> list[bytes]:
    """The blocks of all ranks, in one message from everyone to everyone."""
    told = torch.frombuffer(bytearray(mine * size), dtype=torch.uint8)
    heard = torch.empty_like(told)
    wire.all_to_all(heard, told, [], []).wait()
    whole = bytes(heard.tolist())
    return [whole[at : at + len(mine)] for at in range(0, len(whole), len(mine))]


def compare(blocks: Sequence[bytes | None], names: tuple[int, ...], op: str) -> None:
    """Raises Mismatch, with what each rank calls, where the blocks differ; None is a rank that has not come yet.

    `names` are the global ranks of the group's members.
    """
    known = {index: each for index, each in enumerate(blocks) if each is not None}
    if len({each[:_DIGEST] for each in known.values()}) > 1:
        said = [f"rank {name} {_said(each)}" for name, each in zip(names, blocks, strict=True)]
        raise Mismatch(f"the ranks of a group call different operations: {', '.join(said)}; nothing was transferred")
    numbers = {index: struct.unpack(f"<{2 * len(names)}q", each[_DIGEST + _TEXT :]) for index, each in known.items()}
    if not any(map(any, numbers.values())):
        return
    for source, mine in numbers.items():
        for target, theirs in numbers.items():
            given, got = mine[len(names) + target], theirs[source]
            if given != got:
                raise Mismatch(
                    f"{op}: rank {names[source]} gives rank {names[target]} {given} elements, "
                    f"rank {names[target]} expects {got}; nothing was transferred"
                )


def _said(one: bytes | None) -> str:
    if one is None:
        return "has not come yet"
    return "calls " + one[_DIGEST : _DIGEST + _TEXT].rstrip(b"\0").decode(errors="replace")


def _shown(mine: Signature, call: Call) -> str:
    shown = [describe(each) for each in call.compared[:_MOST_TENSORS_SHOWN]]
    if len(call.compared) > _MOST_TENSORS_SHOWN:
        shown.append(f"and {len(call.compared) - _MOST_TENSORS_SHOWN} more")
    return " ".join([mine.op, *([f"({mine.detail})"] if mine.detail else []), ", ".join(shown)]).strip()
