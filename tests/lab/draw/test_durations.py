"""Durations as text: of a fast machine and of a slow one."""

from __future__ import annotations

import math
import random

import pytest

from engram_lab.lab.draw.durations import digits


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (0.046, 1, "0.046"),
        (0.0461, 0, "0.046"),
        (0.5, 2, "0.50"),
        (12.345, 1, "12.3"),
        (12.345, 2, "12.35"),
        (1234.5, 0, "1234"),
        (1.0, 0, "1.0"),
        (0.1, 1, "0.10"),
        (3e-7, 2, "0.00000030"),
        (0.0, 1, "0.0"),
        (math.nan, 1, "nan"),
        (math.inf, 2, "inf"),
    ],
)
def test_two_digits_are_seen(value: float, decimals: int, text: str) -> None:
    assert digits(value, decimals) == text


def test_what_is_read_is_what_was_measured() -> None:
    draw = random.Random(3)
    for _ in range(500):
        value = 10 ** draw.uniform(-8, 5)
        assert float(digits(value, draw.randrange(4))) == pytest.approx(value, rel=0.0501)
