"""Lines of the ranks: equal ones once, others marked, none lost, none twice."""
from __future__ import annotations

from collections import Counter

import pytest
from fake_page import Cell
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_nb.notebook.digits import differing_numbers, skeleton
from colossal_nb.notebook.fold import rank_list
from colossal_nb.notebook.merge import Item, Merger
from colossal_nb.notebook.text import HEAD_LINES, TAIL_LINES


def test_equal_lines_are_shown_once_without_a_mark_under_a_strategy() -> None:
    assert Cell().all_print("4.1234\n4.0001\n").end().text() == "4.1234\n4.0001\n"


def test_a_bare_cell_says_once_that_lines_are_the_same() -> None:
    assert Cell(bare=True).all_print("a\nb\n").end().text() == "a\nb\n(same on ranks 0-3)\n"


def test_a_single_equal_line_has_the_word_beside_it() -> None:
    cell = Cell(bare=True).all_print("\na\n").wait(0.01)
    assert cell.all_print("b\n").end().text() == "\na  (same on ranks 0-3)\nb\n"


def test_one_rank_needs_no_marks() -> None:
    assert Cell(ranks=1, bare=True).prints(0, "a\n").end().text() == "a\n"


def test_a_line_is_held_until_all_ranks_printed_it() -> None:
    cell = Cell()
    for rank in range(3):
        cell.prints(rank, "x\n")
    assert cell.wait(0.19).page.text() == ""
    assert cell.prints(3, "x\n").wait(0).page.text() == "x\n"


def test_a_line_of_some_ranks_is_shown_marked_after_the_hold() -> None:
    cell = Cell().prints(0, "x\n").prints(2, "x\n").wait(0.21)
    assert cell.page.text() == "[0,2] x\n"


def test_a_late_equal_line_only_extends_the_mark() -> None:
    cell = Cell().prints(0, "x\ny\n").wait(0.3)
    for rank in (1, 2, 3):
        cell.prints(rank, "x\ny\n")
    assert cell.end().text() == "[0] x\n[0] y\n[1-3] the same 2 lines\n"


def test_where_ranks_come_late_with_the_same_the_next_lines_are_held_longer() -> None:
    cell = Cell(ranks=2)
    for step in range(4):
        cell.prints(0, f"step {step}a\n").wait(0.3).prints(1, f"step {step}a\n").wait(0.0)
    assert cell.end().text() == "[0] step 0a\n[1] the same line\nstep 1a\nstep 2a\nstep 3a\n"


def test_lines_of_one_rank_alone_are_not_held_longer() -> None:
    cell = Cell(ranks=2)
    for step in range(5):
        assert cell.prints(0, "only rank 0\n").wait(0.21).page.text() == "[0] only rank 0\n" * (step + 1)


def test_late_lines_that_differ_in_digits_are_folded_as_in_time() -> None:
    cell = Cell(ranks=2).prints(1, "rank 1 of 2\nrank 1 ends\n").wait(0.3)
    assert cell.prints(0, "rank 0 of 2\nrank 0 ends\n").end().text() == (
        "[1] rank 1 of 2\n[1] rank 1 ends\n[0] 2 alike lines, numbers differ; --show all shows them\n")


def test_late_lines_are_written_when_every_line_is_asked_for() -> None:
    cell = Cell(ranks=2, show_all=True).prints(1, "rank 1\nend\n").wait(0.3)
    assert cell.prints(0, "rank 0\nend\n").end().text() == "[1] rank 1\n[1] end\n[0] rank 0\n[0] the same line\n"


def test_an_additional_line_does_not_put_ranks_out_of_step() -> None:
    cell = Cell().prints(0, "only here\nsame 1\nsame 2\n")
    for rank in (1, 2, 3):
        cell.prints(rank, "same 1\nsame 2\n")
    assert cell.end().text() == "[0] only here\nsame 1\nsame 2\n"


def test_lines_that_differ_in_digits_fold_to_the_first_rank() -> None:
    text = Cell().all_print("rank {rank} of 4\n").all_print("loss {rank}.5 at {rank}\n").end().text()
    assert text == ("[0] rank 0 of 4  (3 alike, differ in 1 number; --show all shows them)\n"
                    "[0] loss 0.5 at 0  (3 alike, differ in 2 numbers)\n")


def test_show_all_writes_every_line() -> None:
    text = Cell(show_all=True).all_print("rank {rank}\n").end().text()
    assert text == "[0] rank 0\n[1] rank 1\n[2] rank 2\n[3] rank 3\n"


def test_show_one_rank_leaves_the_others_out() -> None:
    assert Cell(bare=True, only=[0]).all_print("rank {rank}\n").end().text() == "[0] rank 0\n"


def test_leading_spaces_empty_lines_and_odd_words_are_kept() -> None:
    text = "    indented\n\n\ttab execution_count\n"
    assert Cell().all_print(text).end().text() == text


def test_streams_keep_their_order_and_their_names() -> None:
    page = Cell().all_print("out\n").all_print("err\n", "stderr").all_print("again\n").end()
    assert page.writes == [("stdout", "out\n"), ("stderr", "err\n"), ("stdout", "again\n")]


def test_a_line_that_grows_is_streamed_and_never_sent_again() -> None:
    cell = Cell()
    for dot in range(5):
        cell.all_print(".").wait(0.25)
        assert cell.page.text() == "." * (dot + 1)
    assert cell.all_print(" done\n").end().text() == "..... done\n"


def test_text_without_a_newline_is_shown_at_the_end() -> None:
    assert Cell().all_print("no newline").end().text() == "no newline\n"


def test_a_growing_line_that_parts_is_written_whole_with_marks() -> None:
    cell = Cell().all_print("loading ").wait(0.3)
    cell.prints(0, "a\n")
    for rank in (1, 2, 3):
        cell.prints(rank, "b\n")
    assert cell.end().text() == "loading \n[0] loading a\n[1-3] loading b\n"


def test_a_long_text_is_folded_to_head_note_and_tail() -> None:
    cell = Cell()
    count = 3 * HEAD_LINES
    page = cell.all_print("".join(f"line {i}\n" for i in range(count))).end()
    lines = page.text().splitlines()
    assert lines[:HEAD_LINES] == [f"line {i}" for i in range(HEAD_LINES)]
    assert lines[HEAD_LINES:] == [f"line {i}" for i in range(count - TAIL_LINES, count)]
    assert page.pictures == [f"... {count - HEAD_LINES - TAIL_LINES:,} lines of each rank left out here: "
                             f"cnb.last_run.outputs has them (--show all puts them on the page)"]


def test_forty_thousand_distinct_lines_reach_the_page_when_asked() -> None:
    cell = Cell(show_all=True)
    for start in range(0, 10_000, 100):
        cell.all_print("".join(f"rank {{rank}} word{i} says\n" for i in range(start, start + 100))).wait(0.01)
    page = cell.end()
    lines = Counter(page.text().splitlines())
    assert sum(lines.values()) == len(lines) == 40_000
    assert all(f"[{r}] rank {r} word{i} says" in lines for r in range(4) for i in (0, 5_000, 9_999))
    assert len(page.writes) <= 101


def test_a_line_as_long_as_a_book_is_cut_on_the_page() -> None:
    text = Cell().all_print("x" * 1_000_000 + "\n").end().text()
    assert len(text) < 21_000 and "1,000,001 characters" in text


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.sampled_from([0.0, 0.05, 0.3])), max_size=40))
def test_nothing_is_lost_or_doubled_whatever_the_order(prints: list[tuple[int, str, float]]) -> None:
    merger = Merger(range(3), fold=False)
    now, seen = 0.0, Counter[tuple[int, str]]()
    rows = []
    for rank, text, pause in prints:
        now += pause
        merger.add(rank, Item("stdout", text), now)
        rows += merger.take(now)
    rows += merger.finish()
    told = Counter[int]()
    for row in rows:
        for group in row.groups:
            for rank in group.ranks:
                if row.late:
                    told[rank] += row.late
                else:
                    seen[rank, group.item.text] += 1
    printed = Counter((rank, text) for rank, text, _ in prints)
    assert not seen - printed
    for rank in range(3):
        missing = sum(count for (of, _), count in (printed - seen).items() if of == rank)
        assert missing == told[rank]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["a", "b", "c1", "c2"]), max_size=20))
def test_equal_texts_come_out_as_they_went_in(lines: list[str]) -> None:
    text = "".join(line + "\n" for line in lines)
    assert Cell().all_print(text).end().text() == text


@pytest.mark.parametrize("ranks, text", [((0,), "0"), ((0, 1), "0,1"), ((0, 1, 2, 5), "0-2,5"), ((3, 1), "1,3")])
def test_rank_lists(ranks: tuple[int, ...], text: str) -> None:
    assert rank_list(ranks) == text


def test_numbers_addresses_and_widths_do_not_count_as_words() -> None:
    lines = ["loss  9.5 at 0x7f00aa", "loss 10.5 at 0x7f00bb"]
    assert skeleton(lines[0]) == skeleton(lines[1])
    assert differing_numbers(lines) == 2
    assert skeleton("loss nan") != skeleton("loss 1.0")


def test_equal_pictures_are_shown_once_and_others_under_a_mark() -> None:
    cell = Cell()
    for rank in range(4):
        cell.shows(rank, image_png="equal", text_plain="<Figure>")
        cell.shows(rank, image_png=f"rank {rank}", text_plain=f"<Figure {rank}>")
    page = cell.end()
    assert page.pictures == ["<Figure>", "<Figure 0>", "<Figure 1>", "<Figure 2>", "<Figure 3>"]
    assert page.text() == "[0]\n[1]\n[2]\n[3]\n"


def test_a_late_picture_is_the_same_or_another_one() -> None:
    cell = Cell(ranks=2).shows(0, image_png="a", text_plain="A").shows(0, image_png="a", text_plain="A").wait(0.3)
    cell.shows(1, image_png="a", text_plain="A").shows(1, image_png="b", text_plain="B")
    assert cell.end().pictures == ["A", "A", "B"]
    assert cell.page.text() == "[0]\n[0]\n[1] the same output\n[1]\n"


def test_results_are_merged_and_lined_up() -> None:
    cell = Cell(ranks=3)
    for rank in range(3):
        cell.shows(rank, "result", text_plain="[1,\n 2]" if rank else "7")
    assert cell.end().pictures == ["[0] 7\n[1,2] [1,\n       2]"]


def test_results_of_every_rank_are_shown_when_only_digits_differ() -> None:
    cell = Cell(bare=True)
    for rank in range(4):
        cell.shows(rank, "result", text_plain=str(rank))
    assert cell.end().pictures == ["[0] 0\n[1] 1\n[2] 2\n[3] 3"]


def test_results_that_differ_only_in_addresses_are_equal() -> None:
    cell = Cell()
    for rank in range(4):
        cell.shows(rank, "result", text_plain=f"<object at 0x7f00000000{rank}0>")
    assert len(cell.end().pictures) == 1
    assert cell.page.pictures[0].startswith("<object at 0x")


def test_displays_are_updated_in_place() -> None:
    cell = Cell()
    for rank in range(4):
        cell.shows(rank, display_id=f"of {rank}", text_plain="0 %")
        cell.shows(rank, "update_display", display_id=f"of {rank}", text_plain="50 %")
    page = cell.end()
    assert page.pictures == ["50 %"]
    assert list(page.updates.values()) == [2]


def test_text_and_pictures_keep_their_order() -> None:
    cell = Cell()
    for rank in range(4):
        cell.prints(rank, "before").shows(rank, text_plain="picture").prints(rank, "after\n")
    page = cell.end()
    assert page.text() == "before\nafter\n"
    assert page.writes[0] == ("stdout", "before\n")


def test_clear_output_clears_the_page_once() -> None:
    cell = Cell()
    for rank in range(4):
        cell.prints(rank, "old\n").shows(rank, "clear", name="wait").prints(rank, "new\n")
    page = cell.end()
    assert page.cleared == [True]
    assert page.text() == "old\nnew\n"


TIMED = "{} µs ± 10 ns per loop (mean ± std. dev. of 7 runs, 100,000 loops each)\n"


@pytest.mark.parametrize("line", [TIMED, "Wall time: {} ms\n", "CPU times: user {} µs, sys: 0 ns, total: 5 µs\n"])
@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_what_was_measured_is_shown_of_every_rank(line: str, wait_s: float) -> None:
    cell = Cell()
    for rank in (2, 0, 3, 1):
        cell.prints(rank, line.format(f"1.{rank}")).wait(wait_s)
    shown = cell.end().text()
    assert sorted(shown.splitlines(True)) == [f"[{rank}] {line.format(f'1.{rank}')}" for rank in range(4)]


def test_a_cells_file_has_another_name_in_each_process() -> None:
    cell = Cell(ranks=2, bare=True)
    for rank in (0, 1):
        name = f"/tmp/ipykernel_4{rank}/123.py"
        cell.shows(rank, text_plain=f"Docstring: doubles\nFile: {name}\nType: function")
        cell.prints(rank, f'  File "{name}", line 3, in loss\n{name}:4: UserWarning: careful\n', "stderr")
    page = cell.end()
    assert len(page.pictures) == 1
    assert page.text("stderr") == (
        '  File "cell", line 3, in loss\ncell, line 4: UserWarning: careful\n(same on ranks 0,1)\n')
