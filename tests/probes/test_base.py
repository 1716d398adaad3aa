"""Records go to JSON and back unchanged, to the bit and to the byte."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pytest

from engram_lab.models.errors import DataError
from engram_lab.probes.base import Array, Protocol, Record, Report, arrays_of


@dataclass(frozen=True, eq=False)
class Inner(Record):
    label: str
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Sample(Record):
    values: Annotated[np.ndarray, Array("layer", "pos", unit="nats")]
    ranks: Annotated[np.ndarray | None, Array("pos", dtype="int64")] = None
    means: Annotated[np.ndarray | None, Array("layer", dtype="float64")] = None
    score: float = 0.0
    bound: float | None = None
    inner: tuple[Inner, ...] = ()
    names: dict[int, str] | None = None
    sizes: tuple[int, str] = (0, "")


def through_json(record: Record) -> Any:
    return type(record).from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False)))


def test_every_float32_comes_back_to_the_bit() -> None:
    """All exponents, with random and extreme mantissas, subnormals among them."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, size=20_000, dtype=np.uint32)
    bits[:8] = [0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x80000000, 0x80000001, 0x3F800000]
    values = bits.view(np.float32)
    values[~np.isfinite(values)] = np.nan
    record = Sample(values=values.reshape(4, 5000))
    back = through_json(record)
    assert back == record
    finite = ~np.isnan(record.values)
    assert np.array_equal(back.values.view(np.uint32)[finite], record.values.view(np.uint32)[finite])


def test_a_float32_is_written_short() -> None:
    assert json.dumps(Sample(values=np.array([[0.1, 2.5]], np.float32)).to_dict()["values"]) == "[[0.1, 2.5]]"


def test_every_kind_of_field_comes_back() -> None:
    record = Sample(
        values=np.array([[1, np.nan], [-0.0, 3e-39]], np.float32),
        ranks=np.array([5, 2**40]),
        means=np.array([np.pi, np.nan]),
        score=float("nan"),
        bound=0.1,
        inner=(Inner("a", (1, 2)), Inner("naïve 東京")),
        names={7: "x", 10: "y"},
        sizes=(3, "z"),
    )
    plain = record.to_dict()
    assert plain["values"][0] == [1.0, None] and plain["score"] is None and plain["names"] == {"7": "x", "10": "y"}
    back = through_json(record)
    assert back == record and hash(back) == hash(record)
    assert isinstance(back.inner[0], Inner) and back.names == {7: "x", 10: "y"}
    assert back.means.dtype == np.float64 and back.ranks.dtype == np.int64
    assert through_json(back).to_dict() == plain


@pytest.mark.parametrize(
    "change",
    [
        {"values": np.array([[1.0, 2.5]], np.float32)},
        {"ranks": np.array([1, 3])},
        {"ranks": None},
        {"score": 1.0},
        {"inner": (Inner("b"),)},
        {"names": {1: "w"}},
    ],
)
def test_records_that_differ_are_not_equal(change: dict[str, Any]) -> None:
    record = Sample(
        values=np.array([[1.0, 2.0]], np.float32), ranks=np.array([1, 2]), inner=(Inner("a"),), names={1: "v"}
    )
    assert record == dataclasses.replace(record)
    assert dataclasses.replace(record, **change) != record


@pytest.mark.parametrize(
    "fields",
    [
        {"values": np.zeros((2, 2))},  # float64
        {"values": np.zeros(2, np.float32)},
        {"values": np.zeros((2, 3), np.float32), "ranks": np.zeros(2, np.int64)},
    ],
)
def test_arrays_that_do_not_fit_are_refused(fields: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match=r"values|ranks"):
        Sample(**fields)


def test_arrays_cannot_be_changed() -> None:
    record = Sample(values=np.zeros((1, 1), np.float32))
    with pytest.raises(ValueError, match="read-only"):
        record.values[0, 0] = 1


def test_axes_and_units_are_told() -> None:
    held = arrays_of(Sample)
    assert list(held) == ["values", "ranks", "means"]
    assert held["values"].axes == ("layer", "pos") and held["values"].unit == "nats"


@pytest.mark.parametrize(
    "stored",
    [
        [],
        {"values": [[1.0]], "surprise": 1},
        {"score": 1.0},
        {"values": [[1.0], [1.0, 2.0]]},
        {"values": [["x"]]},
        {"values": [[1.0]], "inner": [{"label": 3}]},
        {"values": [[1.0]], "inner": "text"},
        {"values": [[1.0]], "sizes": [1]},
    ],
)
def test_damaged_records_are_refused_in_one_sentence(stored: Any) -> None:
    with pytest.raises(DataError) as caught:
        Sample.from_dict(stored)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "stored", [None, {}, {"probe": "lens"}, {"probe": "x", "config": 1, "protocol": 1, "result": 1}]
)
def test_what_is_no_report_is_refused(stored: Any) -> None:
    with pytest.raises(DataError):
        Report.from_dict(stored)


def test_protocol_names_the_versions_and_nothing_of_the_moment() -> None:
    protocol = Protocol.of([], [], seed=3)
    assert set(protocol.versions) == {"python", "torch", "transformers", "nnsight", "numpy", "engram_lab"}
    assert protocol.versions["numpy"] == np.__version__
    assert protocol.to_dict() == Protocol.of([], [], seed=3).to_dict()
