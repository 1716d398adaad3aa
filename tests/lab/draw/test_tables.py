"""Numbers and tables as text."""

from types import SimpleNamespace

import numpy as np

from engram_lab.lab.draw import tables


def test_an_interval_reads_as_written() -> None:
    assert tables.interval(1.234, 1.0, 2.0) == "1.23 [1.00, 2.00]"
    assert tables.interval(1.26, None, None, 1) == tables.interval(1.26, np.nan, 2.0, 1) == "1.3"
    assert tables.interval(None) == tables.interval(float("nan"), 0.0, 1.0) == "–"
    assert tables.interval(None, missing="") == ""


def test_a_figure_of_a_result_is_read_with_its_bounds() -> None:
    result = SimpleNamespace(
        a=np.array([[1.0, 2.0], [3.0, 4.0]]),
        a_low=np.array([[0.5, 1.5], [2.5, 3.5]]),
        a_high=None,
        b=2,
        b_low=1,
        b_high=3,
    )
    assert tables.bounds(result, "a", (1, 0)) == (3.0, 2.5, None)
    assert tables.interval_of(result, "a", (1, 0)) == "3.00"
    assert tables.interval_of(result, "b", digits=0) == "2 [1, 3]"
    mean, low, high = tables.bounds(result, "a", (slice(None), 1))
    assert mean.tolist() == [2.0, 4.0] and low.tolist() == [1.5, 3.5] and high is None


def test_tables_stand_in_columns() -> None:
    assert tables.markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert tables.columns([["a", "bcd"], ["long", "e"]]) == ["a     bcd", "long  e"]
    assert tables.columns([["a", "b"]], [3, 0]) == ["a    b"], "columns as wide as was known before"
