"""Back-pressure for output, without processes."""
from __future__ import annotations

import threading
from collections.abc import Callable

from colossal_nb.engine.flow import LIMIT_BYTES, Flow
from colossal_nb.notebook.bars import Bars
from colossal_nb.notebook.lines import MOST_PARTIAL, Splitter


def waits(flow: Flow, unsent: Callable[[], int] = int) -> bool:
    """Whether one who wants to print now has to wait."""
    thread = threading.Thread(target=flow.wait, args=(unsent,), daemon=True)
    thread.start()
    thread.join(0.2)
    return thread.is_alive()


def test_who_prints_waits_for_who_reads() -> None:
    flow, sent = Flow(), []
    send = flow.counted(sent.append)
    flow.begin(heard=5_000)                            # of an earlier process with this number
    send([b"x" * LIMIT_BYTES])
    assert not waits(flow)
    assert waits(flow, lambda: 1)
    send([b"topic", b"x" * 10])
    assert waits(flow)
    flow.credit(4_000)                                 # an old count, late
    assert waits(flow)
    flow.credit(5_000 + 100)
    assert not waits(flow)
    assert len(sent) == 2


def test_a_cell_of_somebody_who_does_not_count_is_not_held_up() -> None:
    flow = Flow()
    flow.begin(None)
    flow.counted(lambda parts: None)([b"x" * (2 * LIMIT_BYTES)])
    assert not waits(flow)


def test_what_a_count_has_lost_is_forgotten_at_the_next_cell() -> None:
    flow = Flow()
    flow.begin(0)
    flow.counted(lambda parts: None)([b"x" * (2 * LIMIT_BYTES)])
    assert waits(flow)
    flow.begin(0)
    assert not waits(flow)


def test_a_line_without_an_end_is_cut() -> None:
    splitter = Splitter(0, "stdout", Bars([0], lambda *_: None, lambda: ""))
    lines = [line for _ in range(50) for line in splitter.feed("x" * (MOST_PARTIAL // 10), 0.0)]
    assert len(lines) >= 3
    assert len(splitter.partial) <= MOST_PARTIAL
    assert sum(map(len, [*lines, splitter.partial])) == 50 * (MOST_PARTIAL // 10)
