"""Files stay short enough to be read in one sitting, and the report that says so works."""

import subprocess
import sys
from pathlib import Path

import pytest
import size_report

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", size_report.FOLDERS)
def test_no_file_passes_the_hard_limit(folder):
    _, too_long = size_report.report(ROOT / folder)
    assert too_long == []


def test_report_counts_files_lines_and_functions(tmp_path):
    (tmp_path / "a.py").write_text("def one():\n    return 1\n\n\ndef two(): return 2\n")
    (tmp_path / "b.py").write_text("x = 1\n")
    text, too_long = size_report.report(tmp_path)
    assert "2 files, 6 lines, 2 functions, median function 1.5 lines" in text
    assert "largest file: 5 lines" in text
    assert "a.py:1 one" in text
    assert too_long == []


def test_a_file_that_is_too_long_fails_the_report(tmp_path):
    (tmp_path / "long.py").write_text("x = 1\n" * 501)
    (tmp_path / "full.py").write_text("x = 1\n" * 500)
    script = ROOT / "tools" / "size_report.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "long.py has 501 lines, the limit is 500" in done.stdout
    assert "full.py has" not in done.stdout
