"""Progress bars of the ranks: one for equal loops, one per rank else, few updates, the last state kept."""
from __future__ import annotations

import io

import pytest
from fake_page import Cell
from tqdm import tqdm

from colossal_nb.notebook.bars import Screen


def drawn(total: int, title: str = "train", stop: int | None = None) -> list[str]:
    """What tqdm writes, piece by piece."""
    pieces: list[str] = []

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    bar = tqdm(total=total, desc=title, file=Out(), mininterval=0, ncols=60)
    for _ in range(total if stop is None else stop):
        bar.update()
    if stop is None:
        bar.close()
    return pieces


def test_equal_loops_are_one_bar_whose_last_state_is_kept() -> None:
    cell = Cell()
    for piece in drawn(50):
        cell.all_print(piece, "stderr").wait(0.01)
    page = cell.end()
    assert len(page.pictures) == 1
    assert page.pictures[0].startswith("train: 100%") and "50/50" in page.pictures[0]
    assert page.text("stderr") == ""
    assert max(page.updates.values()) <= 10 * cell.now + 2


def test_the_merged_bar_is_the_slowest_ranks() -> None:
    cell = Cell(ranks=2)
    cell.prints(0, "".join(drawn(10, stop=9)), "stderr").prints(1, "".join(drawn(10, stop=2)), "stderr").wait(1)
    assert cell.page.pictures[0].startswith("train:  20%")


def test_different_loops_are_a_bar_each() -> None:
    cell = Cell(ranks=3)
    for rank in range(3):
        cell.prints(rank, "".join(drawn(10 if rank else 20)), "stderr")
    rows = cell.end().pictures[0].splitlines()
    assert [row[:5] for row in rows] == ["[0] t", "[1,2]"]
    assert "20/20" in rows[0] and "10/10" in rows[1]


def test_nested_bars_are_rows_of_one_block() -> None:
    outer, inner = "outer:  50%|##  | 1/2 [a]", "inner: 100%|####| 5/5 [b]"
    cell = Cell(ranks=2).all_print(f"\r{outer}", "stderr").all_print(f"\n\r{inner}\x1b[A", "stderr").wait(1)
    assert cell.end().pictures == [f"{outer}\n{inner}"]


def test_lines_after_a_bar_are_lines_again() -> None:
    cell = Cell(ranks=2).all_print("".join(drawn(3)) + "done\n", "stderr")
    page = cell.end()
    assert page.text("stderr") == "done\n"
    assert "3/3" in page.pictures[0]


def test_a_counter_that_redraws_itself_ends_with_its_last_number() -> None:
    cell = Cell()
    for step in range(100):
        cell.all_print(f"\rstep {step}").wait(0.001)
    assert cell.end().pictures == ["step 99"]


def test_text_before_a_redraw_belongs_to_it() -> None:
    cell = Cell(ranks=1).prints(0, "working").prints(0, " 1%").prints(0, "\rworking 2%")
    assert cell.end().pictures == ["working 2%"]


def test_windows_newlines_are_lines() -> None:
    assert Cell(ranks=1).prints(0, "a\r\nb\r\n").end().text() == "a\nb\n"


def test_colours_are_text() -> None:
    text = "\x1b[31mred\x1b[0m\n"
    assert Cell(ranks=1).prints(0, text).end().text() == text


def test_bars_one_after_the_other_are_blocks_that_merge_by_their_number() -> None:
    cell = Cell(ranks=2)
    for epoch in range(3):
        cell.all_print("".join(drawn(4, f"epoch {epoch}")), "stderr").wait(0.3)
    rows = [row for picture in cell.end().pictures for row in picture.splitlines()]
    assert [row.split(":")[0] for row in rows] == ["epoch 0", "epoch 1", "epoch 2"]


def test_a_screen_is_a_small_terminal() -> None:
    screen = Screen()
    screen.feed("first\nsecond\x1b[A\rFIRST\x1b[B\x1b[K!")
    assert screen.text() == ["FIRST", "secon!"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_drawing_stands_where_it_was_printed(ranks: int) -> None:
    cell = Cell(ranks=ranks).all_print("before\n").all_print("a\rb\n").all_print("tab\n").all_print("c\rd\ne\n")
    assert cell.end().whole == ["before", "b", "tab", "d", "e"]


def test_it_waits_for_the_lines_before_it_and_those_behind_wait_for_it() -> None:
    cell = Cell(ranks=2).prints(0, "x\na\rb\nafter\n").wait(0.1)
    assert cell.page.whole == []
    assert cell.prints(1, "x\n").wait(0.01).page.whole == ["x", "[0] b"]
    cell.prints(1, "a\rb\nafter\n")
    assert cell.end().whole == ["x", "b", "after"]


def test_the_bar_of_one_rank_alone_is_drawn_at_once() -> None:
    cell = Cell().prints(0, drawn(10)[0], "stderr").wait(0.0)
    assert cell.page.pictures[0].startswith("[0] train:   0%")


def test_a_bar_among_late_lines_keeps_its_place() -> None:
    cell = Cell(ranks=2).prints(0, "x\n").wait(0.3).prints(0, "a\rb\ny\n").wait(0.3)
    cell.prints(1, "x\na\rb\ny\n")
    assert cell.end().whole == ["[0] x", "b", "[0] y", "[1] the same 2 lines"]
