"""What a cell does to its streams, and text that cannot be encoded: every cell ends, every later one prints."""
from __future__ import annotations

import pytest
from conftest import ALL, printed

from colossal_nb.session import Session

LIMIT_S = 20.0                                         # after which a cell that never ends is stopped


@pytest.mark.parametrize("broken", ["None", "3", "type('W', (), {'write': len})()", "open('/dev/null')", "BROKEN"])
def test_a_stream_that_nothing_can_be_written_to_is_put_back_and_told(session: Session, broken: str) -> None:
    source = ("import sys\nclass Broken:\n    def write(self, text): raise ValueError('no')\n"
              "    def flush(self): raise ValueError('no')\nold = sys.stdout\n")
    stands = {"BROKEN": "Broken()", "open('/dev/null')": "file"}.get(broken, broken)
    run = session.run(f"{source}file = open('/dev/null', 'w'); file.close()\nsys.stdout = {stands}", timeout_s=LIMIT_S)
    assert run.wait().status == "ok", run.errors
    assert len(run.notes) == 1
    assert "sys.stdout was" in run.notes[0]
    run = session.run("print('back1')\nsys.stdout = old; print('back2')", timeout_s=LIMIT_S).wait()
    assert run.status == "ok", run.errors
    assert printed(run) == ["back1\nback2"] * 4


def test_a_stream_of_the_users_stays(session: Session) -> None:
    run = session.run("import sys\nclass Loud:\n    def write(self, text): old.write(text.upper())\n"
                      "    def flush(self): pass\nold = sys.stdout\nsys.stdout = Loud()\nprint('shout')").wait()
    assert printed(run) == ["SHOUT"] * 4
    assert run.notes == []
    assert printed(session.run("print('still')").wait()) == ["STILL"] * 4
    assert printed(session.run("sys.stdout = old\nprint('plain')").wait()) == ["plain"] * 4


def test_a_stream_that_was_closed_still_prints(session: Session) -> None:
    assert session.run("import sys\nsys.stdout.close()\nsys.stderr.close()").wait().status == "ok"
    assert printed(session.run("print('open')").wait()) == ["open"] * 4


@pytest.mark.parametrize("broken", ["builtins.len = 3", "builtins.dict = None", "del builtins.isinstance"])
def test_a_cell_that_breaks_what_the_engine_needs_ends(session: Session, broken: str) -> None:
    run = session.run(f"import builtins\n{broken}", timeout_s=LIMIT_S).wait()
    assert "TimeoutError" not in {error.ename for error in run.errors.values()}
    assert "StillRunning" not in {error.ename for error in run.errors.values()}
    assert sorted(run.errors) == list(ALL)
    run = session.run("print(len('four'), dict(a=1), isinstance(1, int))", timeout_s=LIMIT_S).wait()
    assert printed(run) == ["4 {'a': 1} True"] * 4, run.errors


def test_what_cannot_be_encoded_is_escaped(session: Session) -> None:
    run = session.run("import os, sys\nprint('half \\ud800 é')\nprint(os.fsdecode(b'name\\xff'), file=sys.stderr)\n"
                      "from IPython.display import display\ndisplay({'text/plain': 'shown \\udcff'}, raw=True)\n"
                      "print(float('nan'))").wait()
    assert run.status == "ok", run.errors
    assert printed(run) == ["half \\ud800 é\nnan"] * 4
    assert run.text(0, "stderr") == "name\\udcff\n"
    shown = [output.data for output in run.outputs[2] if output.kind == "display"]
    assert shown == [{"text/plain": "shown \\udcff"}]


def test_an_error_that_cannot_be_encoded_is_told(session: Session) -> None:
    run = session.run("raise ValueError('bad \\ud800')").wait()
    assert {(error.ename, error.evalue) for error in run.errors.values()} == {("ValueError", "bad \\ud800")}
    assert printed(session.run("print('next')").wait()) == ["next"] * 4
