"""The rows of all cells as one tidy table, with the same type in a column wherever they come from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.fronts import front
from engram_lab.lab.sweep.grid import Sweep
from engram_lab.models.files import whole

if TYPE_CHECKING:
    import pandas as pd

    from engram_lab.probes.base import Report

ENDINGS = (".parquet", ".csv")


def check(path: Path) -> None:
    """LabError for a table that cannot be written, before the work that would be lost."""
    from engram_lab.models.errors import LabError

    if path.suffix.lower() not in ENDINGS:
        raise LabError(f"--out is {path}: a table ends in .parquet or .csv.")
    if path.is_dir():
        raise LabError(f"--out is {path}, a folder: name a file.")
    if not path.parent.is_dir():
        raise LabError(f"There is no folder {path.parent} for --out: make it first.")


def table(sweep: Sweep, reports: Iterable[tuple[int, Report]]) -> pd.DataFrame:
    """The rows of (cell, report) in their order: first what varies, by the option's name, then the probe's columns.

    An option whose name the probe has as a column of its own is called option_NAME.
    """
    import pandas as pd

    columns: dict[str, list[Any]] = {}
    axes: dict[str, list[Any]] = {axis: [] for axis in sweep.axes}
    length = 0
    for cell, report in reports:
        for row in front(sweep.probe).rows(report):
            for axis, values in axes.items():
                values.append(sweep.cells[cell].values[axis])
            for name, value in row.items():
                own = columns.setdefault(name, [])
                own.extend([None] * (length - len(own)))
                own.append(value)
            length += 1
    named = {f"option_{axis}" if axis in columns else axis: values for axis, values in axes.items()}
    data = {name: series([*values, *[None] * (length - len(values))]) for name, values in (named | columns).items()}
    return pd.DataFrame(data)


def series(values: Sequence[Any]) -> pd.Series:
    """A column of one type that can lack values: truth, whole numbers, numbers or text, the first that holds all.

    A list is its JSON; "" beside numbers or truth is a value that is not there, as in the rows of some probes.
    """
    import pandas as pd

    values = [json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value for value in values]
    kinds = {type(value) for value in values if value is not None and value != ""}
    texts = str in kinds or (not kinds and any(value == "" for value in values))
    if texts:
        return pd.Series([None if value is None else str(value) for value in values], dtype="string")
    values = [None if value == "" else value for value in values]
    dtype = "boolean" if kinds == {bool} else "Int64" if kinds == {int} else "float64"
    return pd.Series(values, dtype=dtype)


def write(data: pd.DataFrame, path: Path) -> None:
    """The table as Parquet or CSV, by the ending; whole or not at all."""
    with whole(path, durable=True) as fresh:
        if path.suffix.lower() == ".csv":
            data.to_csv(fresh, index=False, lineterminator="\n")
        else:
            data.to_parquet(fresh, engine="pyarrow", index=False)
