"""The hash of the memory worked through on paper: what a user types as an example, and its steps as text and tables.

All numbers are exact: those beyond 2**53 are shown as text, since a browser would round them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.errors import LabError
from engram_lab.models.hashing import INT64_MAX, NgramHash, is_prime, shift_right
from engram_lab.models.ngrams import HashSteps, hash_steps

# Of the published explanation, at its last position; what follows from it is computed.
EXAMPLE = {"ids": "41 93 17 208", "multipliers": "3 5 7", "sizes": "101 103; 107 109", "pad": "0"}


def whole_numbers(text: str, what: str) -> list[int]:
    """The whole numbers of a text, apart by spaces or commas; LabError for anything else, or none."""
    parts = [part for part in re.split(r"[\s,]+", text.strip()) if part]
    bad = next((part for part in parts if not re.fullmatch(r"\d{1,19}", part)), None)
    if bad is not None:
        raise LabError(f'"{bad}" among the {what} is no whole number from 0 on: type numbers apart by spaces.')
    if not parts:
        raise LabError(f"The {what} are empty: type numbers apart by spaces.")
    return [int(part) for part in parts]


def example(ids: str, multipliers: str, sizes: str, pad: str) -> tuple[NgramHash, Tensor]:
    """(hash, lookback [pos, back]) of a typed example; `sizes` has a group for each order, apart by semicolons.

    LabError for numbers that do not fit together or whose products would not fit int64.
    """
    tokens, factors = whole_numbers(ids, "ids"), whole_numbers(multipliers, "multipliers")
    padding = whole_numbers(pad, "padding id")
    groups = [whole_numbers(group, "table sizes") for group in sizes.split(";") if group.strip()]
    if len(padding) != 1:
        raise LabError(f"The padding id is {len(padding)} numbers: type one.")
    if len(factors) < 2:
        raise LabError("There is one multiplier, but an n-gram of 2 tokens needs 2: type at least two.")
    if len(groups) != len(factors) - 1:
        raise LabError(
            f"{len(factors)} multipliers make the orders 2 to {len(factors)}, which need {len(factors) - 1} groups of "
            f"table sizes, not {len(groups)}: put a semicolon between the groups."
        )
    if len({len(group) for group in groups}) != 1:
        raise LabError("The groups of table sizes differ in length: every order has the same number of heads.")
    if min(min(group) for group in groups) < 1:
        raise LabError("A table size is 0: a head has at least one row.")
    largest, where = max(max(tokens), padding[0]), max(factors)
    if largest * where > INT64_MAX or max(max(group) for group in groups) > INT64_MAX:
        raise LabError(f"{largest} x {where} does not fit into 63 bits: take smaller ids, multipliers or tables.")
    lookback = shift_right(torch.tensor([tokens]), padding[0], len(factors))[0]
    return NgramHash(np.array(factors, dtype=np.int64), groups), lookback


def not_prime(sizes: str) -> list[int]:
    """The table sizes that are no primes, which those of a model always are."""
    return [n for n in whole_numbers(sizes.replace(";", " "), "table sizes") if not is_prime(n)]


def working(hash_: NgramHash, lookback: Tensor, position: int) -> str:
    """The products and their XOR at one position of lookback [pos, back], line by line, decimal and in hexadecimal."""
    steps = hash_steps(hash_, lookback)
    ids, factors = lookback[position].tolist(), hash_.constants()["multipliers"].tolist()
    terms, mixes = steps.terms[position].tolist(), steps.mixes[position].tolist()
    numbers = [f"{i} × {m}" for i, m in zip(ids, factors, strict=True)]
    wide = max(map(len, numbers))
    value = max(len(str(n)) for n in (*terms, *mixes))
    digits = max(len(f"{n:x}") for n in (*terms, *mixes))
    lines = []
    for back, (text, term) in enumerate(zip(numbers, terms, strict=True)):
        name = "x[t]  " if back == 0 else f"x[t-{back}]"
        lines.append(f"{'XOR' if back else '   '} {name} {text:>{wide}} = {term:>{value}}   0x{term:0{digits}x}")
        if back:
            mix = mixes[back - 1]
            lines.append(f"  = mix of the {back + 1}-gram{' ' * max(wide - 9, 0)} {mix:>{value}}   0x{mix:0{digits}x}")
    return "\n".join(lines)


def rows_of(hash_: NgramHash, steps: HashSteps, position: int) -> list[dict[str, Any]]:
    """The rows that a position addresses, one for each order and head, as rows of a table."""
    constants = hash_.constants()
    primes, offsets = (constants[name].reshape(-1, hash_.n_heads) for name in ("primes", "offsets"))
    return [
        {
            "n-gram": k + 2,
            "head": head,
            "mix": str(int(steps.mixes[position, k])),
            "rows of the head": int(primes[k, head]),
            "row = mix mod rows": int(steps.places[position, k, head]),
            "offset": int(offsets[k, head]),
            "row of the table": int(steps.rows[position, k, head]),
        }
        for k in range(primes.shape[0])
        for head in range(primes.shape[1])
    ]


def in_words(steps: HashSteps, position: int) -> str:
    """The outcome in one line: mixes and rows within the heads."""
    mixes = " and ".join(map(str, steps.mixes[position].tolist()))
    rows = ", ".join(map(str, steps.places[position].flatten().tolist()))
    return f"mixes {mixes}; rows {rows}"


def positions_of(steps: HashSteps, lookback: Tensor) -> list[dict[str, Any]]:
    """Lookback, mixes and rows of every position, as rows of a table."""
    return [
        {
            "position": position,
            **{back_name(back): own[back] for back in range(len(own))},
            **{f"mix of the {k + 2}-gram": str(mix) for k, mix in enumerate(steps.mixes[position].tolist())},
            "rows": ", ".join(map(str, steps.places[position].flatten().tolist())),
        }
        for position, own in enumerate(lookback.tolist())
    ]


def back_name(back: int) -> str:
    """How a token of the lookback is called."""
    return f"x[t-{back}]" if back else "x[t]"


def sharers(raw_ids: Sequence[int], name_of: Any, limit: int = 12) -> str:
    """The raw tokens of one canonical id in one cell."""
    shown = "  ".join(name_of(i) for i in raw_ids[:limit])
    return shown if len(raw_ids) <= limit else f"{shown}  and {len(raw_ids) - limit} more"
