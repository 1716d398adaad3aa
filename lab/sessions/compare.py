"""Two runs of one probe, field by field: what is equal to the bit, what is near, what changed; no Streamlit here.

A is the earlier run, B the later one, differences are B - A. Axes are those that a probe's result declares; a tuple of
numbers or texts has the axis "entry", a single one none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from engram_lab.models.errors import LabError
from engram_lab.probes.base import Array, Record, Report, Role, Timing, held_by

Kind = Literal["float", "discrete", "text"]
Word = Literal["identical", "within tolerance", "changed"]

TOLERANCE = 1e-4  # nats, logits or probability, and as much of the value itself: the bound of `engram-lab gpu-check`
FLIPPED = 0.01  # share of an array's integers, truth values or most likely tokens that near ties may turn
ENTRY = "entry"
SECONDS = ("s", "ms")
_NUMERAL = re.compile(r"[-−+]?\d[\d.,]*%?")


@dataclass(frozen=True, eq=False)
class Field:
    """One field of two results; `a` or `b` is None where only the other run has it.

    `timed` is measured in seconds, which no two runs agree on. `role` and `ranks` are what the probe says of it, see
    probes.base. `records_a`, `records_b`: the records that it stands in, innermost first.
    """

    path: str
    kind: Kind
    axes: tuple[str, ...]
    unit: str
    a: np.ndarray | None
    b: np.ndarray | None
    timed: bool = False
    role: Role = "amount"
    ranks: str = ""
    records_a: tuple[Record, ...] = field(default=(), repr=False)
    records_b: tuple[Record, ...] = field(default=(), repr=False)

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Of A and of B."""
        return (None if self.a is None else self.a.shape), (None if self.b is None else self.b.shape)

    @property
    def is_name(self) -> bool:
        """Whether its numbers stand for things, such as ids and positions."""
        return self.role == "name"

    @property
    def comparable(self) -> bool:
        """Whether both are there, with one shape."""
        return self.a is not None and self.b is not None and self.a.shape == self.b.shape

    @property
    def equal(self) -> bool:
        """Equal to the bit, so that 0 is not -0; one NaN is as another."""
        a, b = self.a, self.b
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            return False
        if self.kind == "float":
            bits = f"u{a.dtype.itemsize}"
            return bool(
                ((a.reshape(-1).view(bits) == b.reshape(-1).view(bits)) | np.isnan([a, b]).all(0).ravel()).all()
            )
        return bool(np.all(a == b))

    @property
    def same_nan(self) -> bool:
        """Whether NaN stands at the same places of both."""
        if self.kind != "float":
            return True
        return self.a is not None and self.b is not None and np.array_equal(np.isnan(self.a), np.isnan(self.b))

    @property
    def gaps(self) -> np.ndarray:
        """|B - A| of two float fields of one shape, 0 where both are NaN or the same infinity."""
        assert self.a is not None and self.b is not None
        a, b = self.a.astype(float), self.b.astype(float)
        with np.errstate(invalid="ignore"):
            return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(b - a))

    @property
    def largest(self) -> float | None:
        """The largest |B - A| of numbers, over the places where both are; None for text or other shapes."""
        if self.kind == "text" or not self.comparable:
            return None
        gaps = self.gaps
        return float(gaps[~np.isnan(gaps)].max(initial=0.0))

    @property
    def differ(self) -> int:
        """How many integers, truth values or texts differ."""
        if self.kind == "float" or not self.comparable:
            return 0
        return int(np.sum(self.a != self.b))

    @property
    def reason(self) -> str | None:
        """Why B - A cannot be drawn, or None if it can."""
        if self.a is None or self.b is None:
            return f"only {'A' if self.b is None else 'B'} has it"
        if self.kind == "text":
            return "it is text"
        if self.is_name:
            return "its numbers are names of things, not amounts"
        if self.a.shape != self.b.shape:
            return f"A is {self._size(self.a)}, B is {self._size(self.b)}"
        if not self.a.size:
            return "it is empty"
        if self.ranks:
            ids_a, ids_b = (np.asarray(getattr(around[0], self.ranks)) for around in (self.records_a, self.records_b))
            if not np.array_equal(ids_a, ids_b):
                return "the two runs rank other tokens"
        return None

    def _size(self, value: np.ndarray) -> str:
        return " x ".join(f"{size} {axis}" for axis, size in zip(self.axes, value.shape, strict=True)) or "one number"

    def wrong(self, tolerance: float) -> str | None:
        """Why it is neither identical nor within the tolerance, in a few words, or None."""
        if self.timed or self.equal or self.role == "hash":
            return None
        if self.a is None or self.b is None:
            return f"{self.path}: only {'A' if self.b is None else 'B'} has it"
        if self.a.shape != self.b.shape:
            return f"{self.path}: A is {self._size(self.a)}, B is {self._size(self.b)}"
        if self.kind == "float":
            if not self.same_nan:
                return f"{self.path}: NaN at other places"
            # NaN gaps are gone here: both NaN counts as 0.
            over = self.gaps > tolerance * (1 + np.abs(np.nan_to_num(self.a.astype(float), posinf=0, neginf=0)))
            return f"{self.path}: by up to {self.largest:.3g}{_unit(self.unit)}" if over.any() else None
        if self.kind == "text" and self.role == "prose":
            plain_a, plain_b = ([_NUMERAL.sub("#", str(text)) for text in own.ravel()] for own in (self.a, self.b))
            return None if plain_a == plain_b else f"{self.path}: another sentence"
        if self.kind == "text" and self.role != "spelled":
            return f"{self.path}: other text"
        if self.differ > FLIPPED * self.a.size:
            return f"{self.path}: {self.differ} of {self.a.size} differ"
        return None


@dataclass(frozen=True)
class Verdict:
    """How B stands to A.

    largest, where: the largest difference of a float and its field. differ: integers, truth values and texts that
    differ, over all fields. wrong: what makes it "changed", in a few words each. left_out: fields in seconds.
    """

    word: Word
    largest: float
    where: str
    differ: int
    wrong: tuple[str, ...]
    left_out: tuple[str, ...]


def fields(a: Report, b: Report) -> list[Field]:
    """All fields of two results in their order, also those that only one has; LabError for two probes."""
    if a.probe != b.probe:
        raise LabError(f'A is a run of "{a.probe}" and B one of "{b.probe}": compare two runs of one probe.')
    return list(_walk("", a.result, b.result, Array(), False, (), ()))


def verdict(a: Report, b: Report, tolerance: float = TOLERANCE) -> Verdict:
    """ "identical" if the ids that the models got and every bit of the results are equal.

    "within tolerance" if those ids, shapes, texts and the places of NaN are, floats are within `tolerance` + as much
    of A's value, and of an array's integers, truth values and winning tokens at most FLIPPED differ; hashes of bits
    and the numbers in a probe's sentences are not asked for it. Else "changed". Seconds are left out of all.
    """
    if not (np.isfinite(tolerance) and tolerance >= 0):
        raise LabError(f"The tolerance is {tolerance}; it must be 0 or more.")
    found = fields(a, b)
    asked = [own for own in found if not own.timed]
    wrong = [text for own in asked if (text := own.wrong(tolerance)) is not None]
    if a.protocol.prompt_ids != b.protocol.prompt_ids:
        wrong.insert(0, "prompt_ids: the models got other token ids")
    word: Word = "changed" if wrong else "identical" if all(own.equal for own in asked) else "within tolerance"
    gaps = [(own.largest or 0.0, own.path) for own in asked if own.kind == "float"]
    largest, where = max(gaps, key=lambda gap: gap[0], default=(0.0, ""))
    return Verdict(
        word,
        largest,
        where if largest else "",
        sum(own.differ for own in asked if own.role != "hash"),
        tuple(wrong),
        tuple(own.path for own in found if own.timed),
    )


def _unit(unit: str) -> str:
    return f" {unit}" if unit else ""


def _walk(
    path: str, a: Any, b: Any, held: Array, timed: bool, up_a: tuple[Record, ...], up_b: tuple[Record, ...]
) -> Iterator[Field]:
    """The fields of two values of one place."""
    some = b if a is None else a
    if some is None:
        return
    if isinstance(some, Record):
        timed = timed or isinstance(some, Timing)
        inner = held_by(type(some))
        more_a, more_b = (() if own is None else (own, *up) for own, up in ((a, up_a), (b, up_b)))
        for item in dataclasses.fields(some):
            one, other = getattr(a, item.name, None), getattr(b, item.name, None)
            yield from _walk(f"{path}.{item.name}".lstrip("."), one, other, inner[item.name], timed, more_a, more_b)
        return
    kinds = [_kind(own) for own in (a, b) if own is not None]
    if all(kinds):
        kind: Kind = max((own for own in kinds if own), key=("discrete", "float", "text").index)
        one, other = (None if own is None else _array(own, kind) for own in _in_step(a, b))
        axes = held.axes if isinstance(some, np.ndarray) else (ENTRY,) if isinstance(some, tuple | dict) else ()
        timed = timed or held.unit in SECONDS
        yield Field(path, kind, axes, held.unit, one, other, timed, held.role, held.ranks, up_a, up_b)
        return
    # A dictionary or a tuple of parts; where one is longer, the other has nothing there.
    parts_a, parts_b = (dict(own if isinstance(own, dict) else enumerate(own or ())) for own in (a, b))
    for key in dict.fromkeys([*parts_a, *parts_b]):
        yield from _walk(f"{path}[{key!r}]", parts_a.get(key), parts_b.get(key), held, timed, up_a, up_b)


def _kind(value: Any) -> Kind | None:
    """Of an array, a number, a text, or a tuple or dictionary of these alone; None for what has parts of its own."""
    if isinstance(value, np.ndarray):
        return "float" if value.dtype.kind == "f" else "discrete"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return "float" if isinstance(value, float) else "discrete"
    if isinstance(value, dict):
        return "text" if all(isinstance(item, str) for item in value.values()) else None
    kinds = {_kind(item) if isinstance(item, str | int | float) else None for item in value}
    if kinds <= {"float", "discrete"}:
        return "float" if "float" in kinds else "discrete"
    return "text" if kinds == {"text"} else None


def _in_step(a: Any, b: Any) -> tuple[Any, Any]:
    """The same, but dictionaries of texts as tuples over the keys of both, "" where one has none."""
    keys = list(dict.fromkeys([*a, *b])) if isinstance(a, dict) and isinstance(b, dict) else None
    one, other = (tuple(own.get(key, "") for key in keys or own) if isinstance(own, dict) else own for own in (a, b))
    return one, other


def _array(value: Any, kind: Kind) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    return np.array(value, dtype={"float": np.float64, "discrete": np.int64, "text": object}[kind])
