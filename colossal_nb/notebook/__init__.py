"""All that touches IPython in the kernel: the magics, what they print, completion, help."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError

from colossal_nb.notebook import help as helps
from colossal_nb.notebook.typed import ask_help, forgive


def load_ipython_extension(shell: Any) -> None:
    """Register `%%colossal` and `%colossal`, and warm the engines' server in the background.

    UsageError on a rank, which must not start ranks of its own.
    """
    if type(getattr(shell, "kernel", None)).__module__.startswith("colossal_nb.engine"):
        raise UsageError("this cell already runs on a rank: %load_ext colossal_nb belongs in the kernel, in a cell "
                         "without %%colossal.")
    import colossal_nb
    from colossal_nb import session
    from colossal_nb.notebook import debugger
    from colossal_nb.notebook.completion import Completion
    from colossal_nb.notebook.elsewhere import Elsewhere
    from colossal_nb.notebook.magics import Notebook
    unload_ipython_extension(shell)
    if not hasattr(colossal_nb, "last_run"):
        setattr(colossal_nb, "last_run", None)  # noqa: B010
    notebook = Notebook(shell, session.current())
    _register(shell, notebook.cell, helps.cell(), "cell")
    _register(shell, notebook.line, helps.line(), "line")
    shell.input_transformers_cleanup.insert(0, forgive)
    shell.input_transformers_cleanup.append(ask_help)
    completion = Completion(notebook)
    shell.Completer.custom_matchers.append(completion.matcher())
    _inspect_through(getattr(shell, "kernel", None), completion)
    shell.events.register("post_run_cell", Elsewhere(notebook))
    debugger.install(shell)
    notebook.session.warm()


def unload_ipython_extension(shell: Any) -> None:
    """Take the magics away again. Engines go on until `%colossal stop` or the kernel's end."""
    for kind in ("cell", "line"):
        shell.magics_manager.magics[kind].pop("colossal", None)
    for transformer in (forgive, ask_help):
        if transformer in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.remove(transformer)
    matchers = shell.Completer.custom_matchers
    matchers[:] = [each for each in matchers if getattr(each, "matcher_identifier", "") != "colossal_nb"]
    for each in list(shell.events.callbacks["post_run_cell"]):
        if type(each).__module__ == "colossal_nb.notebook.elsewhere":
            shell.events.unregister("post_run_cell", each)
    _put_back(shell, "debugger")
    _put_back(getattr(shell, "kernel", None), "do_inspect")


def _put_back(owner: Any, name: str) -> None:
    """Undo a replacement of a method, whose `replaces` is what was there before."""
    replaces = getattr(getattr(owner, name, None), "replaces", None)
    if replaces is not None:
        setattr(owner, name, replaces)


def _register(shell: Any, call: Callable[..., None], doc: str, kind: str) -> None:
    def colossal(*texts: str) -> None:
        call(*texts)
    colossal.__doc__ = doc
    shell.register_magic_function(colossal, kind, "colossal")


def _inspect_through(kernel: Any, completion: Any) -> None:
    """Let Shift-Tab below a `%%colossal` line ask rank 0: the shell alone is told only the name, not the cell."""
    if kernel is None:
        return
    ask_kernel = kernel.do_inspect

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        answer = completion.inspect(code, cursor_pos, detail_level)
        return ask_kernel(code, cursor_pos, detail_level, omit_sections) if answer is None else answer
    do_inspect.replaces = ask_kernel  # type: ignore[attr-defined]
    kernel.do_inspect = do_inspect
