"""How many bytes a rank sends: the one wire model, "ring" (formulas of the algorithms, not of a library)."""

from __future__ import annotations

from fractions import Fraction

MODEL = "ring"

# Bytes sent per rank as a multiple of the payload, for n ranks. The payload is the whole logical tensor: all-gather
# its output, reduce-scatter its input, all-to-all the local input, gather and scatter what the root has. A broadcast
# and a reduce move (n-1) payloads in all, a gather and a scatter (n-1)/n of one; each rank is charged the mean.
_PER_RANK = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "broadcast": lambda n: Fraction(n - 1, n),
    "reduce": lambda n: Fraction(n - 1, n),
    "gather": lambda n: Fraction(n - 1, n * n),
    "scatter": lambda n: Fraction(n - 1, n * n),
    "send": lambda n: Fraction(1),
    "recv": lambda n: Fraction(0),
    "barrier": lambda n: Fraction(0),
}


def sent_bytes(op: str, ranks: int, payload_bytes: int) -> Fraction:
    """Bytes that each of `ranks` ranks sends in one call; exact, so that sums can be compared without tolerance."""
    if op not in _PER_RANK:
        raise ValueError(f"the wire model knows {', '.join(_PER_RANK)}; {op!r} is none of them")
    if ranks < 1:
        raise ValueError(f"a collective has at least 1 rank, not {ranks}")
    return _PER_RANK[op](ranks) * payload_bytes if ranks > 1 else Fraction(0)
