"""What users give, checked alike everywhere: one sentence that says what was given and what works."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")


def called_as(usage: str) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]:
    """For public functions: arguments that do not fit raise TypeError with Python's reason and a call that works."""

    def decorate(function: Callable[Args, Result]) -> Callable[Args, Result]:
        signature = inspect.signature(function)

        @wraps(function)
        def called(*args: Args.args, **kwargs: Args.kwargs) -> Result:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                name = getattr(function, "__name__", "it")
                raise TypeError(f"{name}: {error}; it is called as {usage}") from None
            return function(*args, **kwargs)

        return called

    return decorate


def whole_number(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """`value` as an int: also one of NumPy or a tensor with one element; no True, no 2.0, no "2".

    Raises ValueError that says the bounds.
    """
    number = as_whole(value)
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{name}={shown(value)}: {name} is a whole number{_bounds(least, most)}")
    return number


def as_whole(value: Any) -> int | None:
    """The int that a value is; None for everything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError, ValueError):
        return None


def real_number(name: str, value: Any, least: float, of: str = "") -> float:
    """`value` as a float of at least `least`; no string, no NaN. Raises ValueError; `of`: what its values mean."""
    try:
        number = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if math.isnan(number) or number < least:
        raise ValueError(f"{name}={shown(value)}: {name} is a number of at least {least:g}{of and f' ({of})'}")
    return number


def shown(value: Any) -> str:
    """A value inside a sentence: short, and of what is long its kind."""
    try:
        text = repr(value)
    except Exception:
        text = ""
    return text if 0 < len(text) <= 60 and "\n" not in text else f"<{type(value).__name__}>"


def _bounds(least: int | None, most: int | None) -> str:
    if least is not None and most is not None:
        return f" from {least} to {most}"
    return "" if least is None else f", at least {least}"
