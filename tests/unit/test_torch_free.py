"""The kernel stays light: nothing on its side of the house imports torch, nor does loading the extension."""

import subprocess
import sys

import pytest

LIGHT = ["colossal_nb", *(f"colossal_nb.{room}" for room in ("plan", "record", "run", "session", "notebook"))]


def modules_after(code: str) -> set[str]:
    """The names in sys.modules of a fresh interpreter that ran `code`."""
    ask = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", LIGHT)
def test_import_leaves_torch_out(name):
    loaded = modules_after(f"import {name}")
    assert name in loaded
    assert "torch" not in loaded
    assert "pandas" not in loaded


def test_everything_of_the_kernel_together_leaves_torch_out():
    loaded = modules_after("\n".join(f"import {name}" for name in LIGHT))
    assert not loaded & {"torch", "pandas", "matplotlib", "colossal_nb.parallel", "colossal_nb.engine"}


def test_asking_for_a_parallel_name_brings_torch():
    assert "torch" in modules_after("import colossal_nb\ncolossal_nb.parallelize")


def test_an_unknown_name_is_an_attribute_error():
    import colossal_nb

    with pytest.raises(AttributeError, match="no_such_name"):
        colossal_nb.no_such_name  # noqa: B018


def test_dir_lists_the_public_names_without_loading_them():
    loaded = modules_after("import colossal_nb\nassert 'parallelize' in dir(colossal_nb)")
    assert "torch" not in loaded
