"""The TCP sockets of this process, as seen from outside the library that owns them."""

import os
import socket
import stat
from collections.abc import Callable, Iterator

Address = tuple[str, int]


def _open_sockets() -> Iterator[socket.socket]:
    """A duplicate of every IPv4 or IPv6 stream socket of this process.

    Another thread may close a descriptor while we look, so every step works on a duplicate and forgives its absence.
    """
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = os.dup(int(name))
        except OSError:
            continue
        copy = socket.socket(fileno=duplicate)
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                yield copy


def _address(named: Callable[[], tuple[str, int]]) -> Address | None:
    try:
        return named()[:2]
    except OSError:
        return None


def listening() -> set[Address]:
    """Addresses on which this process accepts connections."""
    found = set()
    for each in _open_sockets():
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            address = _address(each.getsockname)
            if address:
                found.add(address)
    return found


def shut_down(accepted_at: set[Address], connected_to: set[Address]) -> int:
    """Shut down, both ways, what was accepted at or connected to the given addresses; returns how many sockets.

    `shutdown` acts on the connection, not on the descriptor, so the owner's copy fails at once, also inside a
    blocked call, and the owner remains the one who closes it.
    """
    count = 0
    for each in _open_sockets():
        peer = _address(each.getpeername)
        if peer is None or (_address(each.getsockname) not in accepted_at and peer not in connected_to):
            continue
        try:
            each.shutdown(socket.SHUT_RDWR)
            count += 1
        except OSError:
            continue
    return count
