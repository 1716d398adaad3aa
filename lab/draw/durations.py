"""Durations as text: no figure of a fast machine may read as nothing."""

from __future__ import annotations

import math


def digits(value: float, decimals: int = 1) -> str:
    """A duration with so many decimals, and with more where fewer than two digits of it would be seen: 12.3, 0.046."""
    if value and math.isfinite(value):
        decimals = max(decimals, 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"
