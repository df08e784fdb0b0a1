"""Before a collective runs: do all ranks of the group mean the same one?

Gloo does not ask. A size that differs ends a rank's process (`EnforceNotMet`), a smaller broadcast silently fills a
part, two different operations wait for each other for ever. So each rank first tells every other what it is about to
do, in 160 bytes, and all of them raise where they differ.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from colossal_nb.parallel.calls import Call
from colossal_nb.parallel.forms import describe
from colossal_nb.parallel.transports.gloo import Gloo
from colossal_nb.parallel.transports.messages import Mismatch

_DIGEST, _NUMBERS, _TEXT = 8, 16, 136
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


def agree(wire: Gloo, mine: Signature, call: Call, index: int, names: tuple[int, ...]) -> None:
    """Tell and ask everyone; raises Mismatch, with what each rank calls, where they differ.

    `names` are the global ranks of the group's members.
    """
    size = len(names)
    digest = hashlib.blake2b(repr((mine.op, mine.detail, mine.alike)).encode(), digest_size=_DIGEST).digest()
    text = _shown(mine, call).encode()[:_TEXT].ljust(_TEXT, b"\0")
    told = torch.stack([_block(digest, text, mine, other) for other in range(size)])
    heard = torch.empty_like(told)
    wire.all_to_all(heard.view(-1), told.view(-1), [], []).wait()
    blocks = [bytes(block.tolist()) for block in heard]
    if any(block[:_DIGEST] != digest for block in blocks):
        calls = [block[_DIGEST + _NUMBERS :].rstrip(b"\0").decode(errors="replace") for block in blocks]
        said = ", ".join(f"rank {name} calls {what}" for name, what in zip(names, calls, strict=True))
        raise Mismatch(f"the ranks of a group call different operations: {said}; nothing was transferred")
    for other, block in enumerate(blocks):
        _compare_pair(mine, block, other, index, names)


def _block(digest: bytes, text: bytes, mine: Signature, other: int) -> Tensor:
    got, given = (numbers[other] if numbers else 0 for numbers in (mine.got, mine.given))
    packed = digest + given.to_bytes(8, "little") + got.to_bytes(8, "little") + text
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _compare_pair(mine: Signature, block: bytes, other: int, index: int, names: tuple[int, ...]) -> None:
    if not mine.got:
        return
    theirs_given, theirs_got = (int.from_bytes(block[at : at + 8], "little") for at in (_DIGEST, _DIGEST + 8))
    pairs = [(other, index, theirs_given, mine.got[other]), (index, other, mine.given[other], theirs_got)]
    for source, target, given, got in pairs:
        if given != got:
            raise Mismatch(
                f"{mine.op}: rank {names[source]} gives rank {names[target]} {given} elements, "
                f"rank {names[target]} expects {got}; nothing was transferred"
            )


def _shown(mine: Signature, call: Call) -> str:
    shown = [describe(each) for each in call.compared[:_MOST_TENSORS_SHOWN]]
    if len(call.compared) > _MOST_TENSORS_SHOWN:
        shown.append(f"and {len(call.compared) - _MOST_TENSORS_SHOWN} more")
    return " ".join([mine.op, *([f"({mine.detail})"] if mine.detail else []), ", ".join(shown)]).strip()
