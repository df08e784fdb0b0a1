"""A session in a plain process: cells on four ranks, values, names."""
from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from conftest import ALL, printed

from colossal_nb.cluster.client import RankFailed
from colossal_nb.run import Output, RankState, Run
from colossal_nb.session import Session


def ok(session: Session, source: str, *args: Any, **options: Any) -> Run:
    run = session.run(source, *args, **options).wait()
    assert run.status == "ok", {rank: (error.ename, error.evalue) for rank, error in run.errors.items()}
    return run


def test_every_rank_runs_the_cell_and_keeps_its_variables(session: Session) -> None:
    ok(session, "kept = 10 * rank")
    run = ok(session, "print(kept, rank, world_size, mesh)")
    assert printed(run) == [f"{10 * rank} {rank} 4 dp=4" for rank in ALL]
    assert (run.ranks, run.error, run.errors) == (ALL, None, {})


def test_the_last_expression_is_a_result_of_each_rank(session: Session) -> None:
    run = ok(session, "rank + 0.5")
    results = [[each for each in run.outputs[rank] if each.kind == "result"] for rank in ALL]
    assert [[each.data and each.data["text/plain"] for each in found] for found in results] == [
        ["0.5"], ["1.5"], ["2.5"], ["3.5"]]


def test_displays_arrive_with_their_bundle(session: Session) -> None:
    run = ok(session, "from IPython.display import HTML, display, clear_output\n"
                      "handle = display(HTML('<b>one</b>'), display_id=True)\n"
                      "handle.update(HTML('<b>two</b>'))\nclear_output(wait=True)")
    kinds = [(each.kind, each.data and each.data.get("text/html"), each.name) for each in run.outputs[2]]
    assert kinds == [("display", "<b>one</b>", ""), ("update_display", "<b>two</b>", ""), ("clear", None, "wait")]
    first, second, _ = run.outputs[2]
    assert first.display_id == second.display_id != ""


def test_streams_are_kept_apart_and_in_order(session: Session) -> None:
    run = ok(session, "import sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('  c')")
    assert [run.text(rank) for rank in ALL] == ["a\n  c\n"] * 4
    assert [run.text(rank, "stderr") for rank in ALL] == ["b\n"] * 4


def test_ten_thousand_lines_of_each_rank_all_arrive(session: Session) -> None:
    run = ok(session, "for i in range(10_000): print(rank, i, 'x' * 60)")
    for rank in ALL:
        assert run.text(rank).splitlines() == [f"{rank} {i} {'x' * 60}" for i in range(10_000)]


def test_a_megabyte_of_stderr_does_not_block(session: Session) -> None:
    run = ok(session, "import sys\nsys.stderr.write('e' * 1_000_000)\nNone")
    assert [len(run.text(rank, "stderr")) for rank in ALL] == [1_000_000] * 4


def test_native_output_is_shown(session: Session) -> None:
    assert printed(ok(session, "import os, time\n_ = os.system('echo from a child')\ntime.sleep(0.5)")) == [
        "from a child"] * 4


def test_output_comes_while_the_cell_runs(session: Session) -> None:
    run = session.run("import time\nprint('first', flush=True)\ntime.sleep(1.5)\nprint('last')")
    seen: list[str] = []
    for message in run:
        if isinstance(message, Output) and message.rank == 0:
            seen.append(message.text)
        if isinstance(message, RankState) and message.state == "done":
            seen.append("done")
    times = [each.time_s for each in run.outputs[0]]
    assert times[1] - times[0] > 1.0
    assert seen.index("first\n") < seen.index("last\n") < len(seen) - 1


def test_shell_commands_magics_and_await(session: Session) -> None:
    assert printed(ok(session, "!echo hello")) == ["hello"] * 4
    run = ok(session, "import asyncio\nawait asyncio.sleep(0.01)\nprint('awaited')\nasync def f(): return 7\nawait f()")
    assert printed(run) == ["awaited"] * 4
    assert [run.outputs[rank][-1].data for rank in ALL] == [{"text/plain": "7"}] * 4
    assert printed(ok(session, "print(asyncio.run(f()))")) == ["7"] * 4
    assert printed(ok(session, "here = %pwd\nimport os; print(here == os.getcwd())")) == ["True"] * 4


def test_timeit_runs_equally_often_on_all_ranks(session: Session) -> None:
    ok(session, "from colossal_nb.parallel.world import World\nimport time, torch\ncount = []\nx = torch.ones(1)\n"
                "def step():\n    count.append(1)\n    time.sleep(0.001 * rank)\n"
                "    World.current().whole().run('all_reduce', [x])")
    ok(session, "%timeit -r 2 step()")
    counts = printed(ok(session, "print(len(count))"))
    assert counts == [counts[0]] * 4
    assert int(counts[0]) >= 3


def test_an_error_names_rank_and_line_and_leaves_the_others_alone(session: Session) -> None:
    run = session.run("value = rank\nif rank == 2:\n    raise ValueError(f'no {rank}')\nprint('fine')").wait()
    assert run.status == "error"
    assert sorted(run.errors) == [2]
    error = run.error
    assert error is not None
    assert (error.rank, error.ename, error.evalue, error.line) == (2, "ValueError", "no 2", 3)
    assert not error.consequence
    assert any("ValueError" in line and "no 2" in line for line in error.traceback)
    assert [run.text(rank) for rank in ALL] == ["fine\n", "fine\n", "", "fine\n"]
    assert printed(ok(session, "print(value)")) == ["0", "1", "2", "3"]


def test_the_line_is_the_cells_own_also_when_it_fails_deeper(session: Session) -> None:
    ok(session, "def deep():\n    return {}['missing']")
    error = session.run("x = 1\n\ndeep()").wait().error
    assert error is not None
    assert (error.ename, error.line) == ("KeyError", 3)


def test_an_error_of_showing_a_value_is_that_of_its_text(session: Session) -> None:
    run = session.run("class Shown:\n    def __repr__(self): raise ValueError('in its text')\nShown()").wait()
    assert {(error.ename, error.evalue, error.line) for error in run.errors.values()} == {
        ("ValueError", "in its text", 2)}


def test_a_syntax_error(session: Session) -> None:
    run = session.run("x = 1\nx = = 2").wait()
    assert {(error.ename, error.line) for error in run.errors.values()} == {("SyntaxError", 2)}
    assert sorted(run.errors) == [0, 1, 2, 3]


def test_an_error_is_formatted_once_and_kept_by_the_history(session: Session) -> None:
    session.run("1 / 0").wait()
    run = ok(session, "print(len([e for e in get_ipython().history_manager.exceptions.values()"
                      " if e['ename'] == 'ZeroDivisionError' and e['traceback']]) > 0)")
    assert printed(run) == ["True"] * 4


@pytest.mark.parametrize("source", ["input('name')", "breakpoint()", "%debug", "import pdb; pdb.set_trace()",
                                    "import getpass; getpass.getpass()", "import sys; print(repr(sys.stdin.read()))"])
def test_what_needs_a_keyboard_ends_at_once(session: Session, source: str) -> None:
    run = session.run(source, timeout_s=20).wait()
    assert "TimeoutError" not in {error.ename for error in run.errors.values()}
    if "stdin" in source:
        assert printed(run) == ["''"] * 4
    else:
        assert sorted(run.errors) == [0, 1, 2, 3]


def test_refusals_say_what_to_do(session: Session) -> None:
    error = session.run("input('name')").wait().error
    assert error is not None
    assert "not possible on a rank" in error.evalue
    assert "%colossal push" in error.evalue


def test_sys_exit_ends_the_cell_not_the_rank(session: Session) -> None:
    ok(session, "before = 5")
    run = session.run("import sys; sys.exit(3)").wait()
    assert {error.ename for error in run.errors.values()} == {"SystemExit"}
    assert printed(ok(session, "print(before)")) == ["5"] * 4


def test_the_strategy_decides_who_works(session: Session) -> None:
    run = ok(session, "print(rank, world_size, mesh)", "tp=2 dp=1")
    assert run.ranks == (0, 1)
    assert printed(run) == ["0 2 tp=2", "1 2 tp=2"]
    assert any("works on 2 of 4 engines" in note for note in run.notes)
    run = ok(session, "1", "tp=2")
    assert run.strategy is not None
    assert (run.strategy.dp, run.strategy.tp, run.ranks, run.title) == (2, 2, ALL, "dp=2 (filled) tp=2")


def test_the_users_own_rank_is_left_alone(session: Session) -> None:
    ok(session, "rank = 'mine'")
    assert printed(ok(session, "print(rank, world_size)")) == ["mine 4"] * 4
    ok(session, "del rank")
    assert printed(ok(session, "print(rank)")) == ["0", "1", "2", "3"]


def test_some_ranks_alone(session: Session) -> None:
    run = ok(session, "print(rank)", ranks=[3, 1])
    assert run.ranks == (1, 3)
    assert printed(run) == ["1", "3"]
    error = session.run("import torch\nfrom colossal_nb.parallel.world import World\n"
                        "World.current().whole().run('all_reduce', [torch.ones(1)])", ranks=[1, 3]).wait().error
    assert error is not None
    assert "runs on ranks 1, 3 alone" in error.evalue


@pytest.mark.parametrize(("arguments", "options", "message"), [
    (("tp=2",), {"ranks": [0]}, "without a strategy"), ((), {"ranks": [4]}, "0 to 3"), ((), {"ranks": []}, "0 to 3"),
    (("dp=1000",), {}, "1000"), (("tq=2",), {}, "tq")])
def test_what_cannot_be_right_is_refused_before_anything_runs(
        session: Session, arguments: tuple[str, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        session.run("ran = True", *arguments, **options)
    assert "ran" not in session.names()[0]
    assert session.engines == 4


def test_cells_begin_with_rank_0s_random_states(session: Session) -> None:
    draw = ("import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item(), "
            "random.gauss(0, 1), numpy.random.randn())")
    first = printed(ok(session, draw))
    assert first == [first[0]] * 4
    ok(session, "for _ in range(rank + 1): random.random(); numpy.random.randn(); torch.rand(3)")
    second = printed(ok(session, draw))
    assert second == [second[0]] * 4
    assert second[0] != first[0]
    ok(session, "random.random()", ranks=[2])
    third = printed(ok(session, draw))
    assert third == [third[0]] * 4


def test_hash_seeds_are_equal(session: Session) -> None:
    values = printed(ok(session, "print(hash('colossal'))"))
    assert values == [values[0]] * 4


def test_a_message_between_two_ranks_needs_no_other(session: Session) -> None:
    session.run("1 / 0").wait()                        # new groups: nothing is connected yet
    source = ("import torch, torch.distributed as dist\nx = torch.zeros(2)\nif rank == 0: dist.recv(x, src=3)\n"
              "if rank == 3: dist.send(x + 7, dst=0)\nprint(x.tolist())")
    assert printed(ok(session, source)) == ["[7.0, 7.0]"] + ["[0.0, 0.0]"] * 3
    pair = ("pair = dist.new_group([1, 2])\nif rank == 1: dist.send(x + rank, dst=2, group=pair)\n"
            "if rank == 2: dist.recv(x, src=1, group=pair)\nprint(x.tolist())")
    assert printed(ok(session, pair)) == ["[7.0, 7.0]", "[0.0, 0.0]", "[1.0, 1.0]", "[0.0, 0.0]"]


@pytest.mark.parametrize("how", [{"strategy": "dp=2"}, {"ranks": [1, 3]}])
def test_once_is_for_the_ranks_of_the_cell(session: Session, how: dict[str, Any]) -> None:
    source = ("import colossal_nb as cnb\n@cnb.once\ndef first(): return rank\n"
              "found = first()\nwith cnb.once() as mine: print(found, bool(mine))")
    run = session.run(source, **how).wait()
    assert run.status == "ok", run.errors
    first, second = run.ranks
    assert [run.text(rank) for rank in run.ranks] == [f"{first} True\n", f"{first} False\n"]
    assert second in (1, 3)


def test_push_and_pull(session: Session) -> None:
    def double(x: int) -> int:
        return 2 * x

    class Local:
        value = 7

    big = np.arange(300_000, dtype=np.float64).reshape(3, -1)
    session.push({"big": big, "double": double, "Local": Local, "word": "ab"})
    run = ok(session, "print(double(rank), Local.value, word, big.shape, float(big[2, 5]), big.flags.writeable)")
    assert printed(run) == [f"{2 * rank} 7 ab (3, 100000) {big[2, 5]} True" for rank in ALL]
    ok(session, "mine = big + rank")
    assert np.array_equal(session.pull("mine", 2), big + 2)
    assert np.array_equal(session.pull("mine"), big)
    assert session.pull("{'a': [word, rank]}", 3) == {"a": ["ab", 3]}
    with pytest.raises(RankFailed, match="no 'nowhere'"):
        session.pull("nowhere")
    with pytest.raises(ValueError, match="0 to 3"):
        session.pull("mine", 9)
    with pytest.raises(TypeError):
        session.push({"stream": (i for i in range(3))})


def test_names_say_what_each_rank_has(session: Session) -> None:
    ok(session, "import torch\nweights = torch.zeros(2, 3)\nif rank == 1: only_here = 'x'\nclass Thing: pass\nlr = 0.1")
    names = session.names()
    assert names[0]["weights"] == "tensor [2, 3] float32"
    assert names[0]["lr"] == "float 0.1"
    assert (names[0]["torch"], names[0]["Thing"]) == ("module", "class")
    assert ["only_here" in names[rank] for rank in ALL] == [False, True, False, False]
    assert not {"rank", "world_size", "mesh", "In", "Out", "get_ipython"} & set(names[0])


def test_completion_and_help_come_from_rank_0(session: Session) -> None:
    ok(session, "particular_name = 3\ndef helped():\n    'what it does'")
    for _ in range(5):                                 # the first one may be slow to load
        answer = session.complete("particular_n", 12)
        if answer:
            break
    assert answer["matches"] == ["particular_name"]
    assert "what it does" in session.inspect("helped", 6)["data"]["text/plain"]


def test_output_after_the_end_of_a_cell_is_not_lost(session: Session) -> None:
    ok(session, "import threading, time\ndef late():\n    time.sleep(0.7)\n    print('late', rank)\n"
                "threading.Thread(target=late).start()")
    run = ok(session, "time.sleep(1.2)")
    assert printed(run) == [f"late {rank}" for rank in ALL]


def test_a_run_that_nobody_iterates_on_is_ended_by_the_next_cell(session: Session) -> None:
    begun = session.run("import time\nleft = 1\ntime.sleep(100)")
    next(iter(begun))
    time.sleep(1)
    run = ok(session, "print(left)")
    assert printed(run) == ["1"] * 4


def test_the_record_of_a_cell_is_complete_when_the_run_ends(session: Session) -> None:
    run = ok(session, "import torch\nfrom colossal_nb.parallel.world import World\nx = torch.ones(8)\n"
                      "for _ in range(50): World.current().whole().run('all_reduce', [x])")
    kinds = run.record.slices["kind"]
    assert [int(((run.record.slices["rank"] == rank) & (kinds == "all_reduce")).sum()) for rank in ALL] == [50] * 4
    assert len(run.slices()) == 200
    off = ok(session, "World.current().whole().run('all_reduce', [x])", record=False)
    assert len(off.record.slices) == 0


def test_ten_cells_in_a_row_keep_their_order(session: Session) -> None:
    ok(session, "order = []")
    for i in range(10):
        ok(session, f"order.append({i})")
    assert printed(ok(session, "print(order)")) == [str(list(range(10)))] * 4
