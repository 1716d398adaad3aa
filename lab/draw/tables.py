"""Numbers and tables as text: a mean with its interval, a Markdown table, columns on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def interval(value: Any, low: Any = None, high: Any = None, digits: int = 2, missing: str = "–") -> str:
    """A mean with its 95 % interval, as it stands in all tables: `0.12 [0.10, 0.14]`.

    `missing` where there is no mean, the mean alone where there is no interval; None and NaN both say so.
    """
    if value is None or value != value:
        return missing
    if low is None or high is None or low != low or high != high:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def bounds(source: Any, field: str, at: Any = None) -> tuple[Any, Any, Any]:
    """(mean, low, high) of a figure of a result, of one entry if `at` names it; None where the result has none."""
    mean, low, high = (getattr(source, field + end) for end in ("", "_low", "_high"))
    if at is None:
        return mean, low, high
    return None if mean is None else mean[at], None if low is None else low[at], None if high is None else high[at]


def interval_of(source: Any, field: str, at: Any = None, digits: int = 2, missing: str = "–") -> str:
    """A figure of a result with its interval, see `bounds` and `interval`."""
    return interval(*bounds(source, field, at), digits=digits, missing=missing)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def columns(rows: Sequence[Sequence[str]], widths: Sequence[int] | None = None) -> list[str]:
    """The lines of a table on a terminal, columns as wide as what they hold, or at least `widths`."""
    if widths is None:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
