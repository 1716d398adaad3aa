"""Reports as bytes and back, and bytes that are none."""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from engram_lab.lab.sessions import packing
from engram_lab.lab.sessions.packing import pack, unpack
from engram_lab.models.errors import DataError
from engram_lab.models.handle import Handle
from engram_lab.probes import cka, gates, rows
from engram_lab.probes.base import Report
from engram_lab.probes.kv import swap
from tests.full import examples
from tests.lab.sessions import made_probe
from tests.probes.kv.tiny import RIVER, opened

pytestmark = pytest.mark.usefixtures("made")

TEXTS = ("The river runs past the old mill", "Paris is the capital of France", "into the sea")


def same_bits(a: Report, b: Report) -> bool:
    """Stricter than ==, for which -0.0 is 0.0 and a list a tuple."""
    arrays: tuple[dict, dict] = ({}, {})
    texts = [packing.canonical(packing.split(report, "", found)) for report, found in zip((a, b), arrays, strict=True)]
    one, two = ({name: (v.dtype, v.shape, v.tobytes()) for name, v in found.items()} for found in arrays)
    return texts[0] == texts[1] and one == two


def test_every_kind_of_field_comes_back(made: Report) -> None:
    data = pack(made)
    back = unpack(data)
    assert back == made and same_bits(back, made) and pack(back) == data
    assert back.config.number != back.config.number and back.config.perhaps == -float("inf")
    grid = back.result.inner[0].grid
    assert grid[0].tobytes() == np.array([np.nan, np.inf, -0.0, 1e-45], np.float32).tobytes()
    assert back.result.inner[1].grid.shape == (0, 5) and back.result.inner[2].mask.shape == (2, 0)
    assert back.config.prompts[1] == made_probe.ODD and back.result.names == made.result.names


def test_it_is_a_safetensors_file_with_the_arrays_by_their_paths(made: Report) -> None:
    arrays = load(pack(made))
    assert arrays["result.inner[0].ids"].tolist() == made.result.inner[0].ids.tolist()
    assert len(arrays) == 12  # four of each inner record


def test_same_report_same_bytes(made: Report) -> None:
    again = made_probe.report()
    turned = np.asfortranarray(again.result.inner[0].grid)
    inner = dataclasses.replace(again.result.inner[0], grid=turned)
    result = dataclasses.replace(again.result, inner=(inner, *again.result.inner[1:]))
    assert pack(dataclasses.replace(again, result=result)) == pack(made)
    assert pack(made_probe.report(seed=1)) != pack(made)


@pytest.fixture(scope="module")
def real(pair: list[Handle], report: Report, set_report: Report) -> list[Report]:
    """Of probes with small and with deep results."""
    names = tuple(handle.name for handle in pair)
    (swapped,) = [opened("llama")]
    return [
        report,
        set_report,
        gates.run(pair[:1], gates.GatesConfig(names[:1], TEXTS[:1], controls=("shuffled",))),
        rows.run(pair[:1], rows.RowsConfig(names[:1], TEXTS[:1], top_k=3)),
        cka.run(pair, cka.CKAConfig(names, TEXTS, None, "all", bootstrap=5)),
        swap.run([swapped], swap.SwapConfig((swapped.name,), RIVER, draws=2)),
    ]


def test_real_reports_come_back(real: list[Report]) -> None:
    for report in real:
        data = pack(report)
        back = unpack(data)
        assert back == report and same_bits(back, report), report.probe
        assert pack(back) == data and back.to_json() == report.to_json(), report.probe


def forged(made: Report, change: Any) -> bytes:
    """A safetensors file that is whole, with other arrays or another text."""
    arrays: dict[str, np.ndarray] = {}
    stored = {"format": packing.FORMAT, "report": packing.split(made, "", arrays)}
    stored = json.loads(json.dumps(stored))
    text = change(stored, arrays)
    data: bytes = save(arrays, {"report": text if isinstance(text, str) else json.dumps(stored)})
    return data


def replaced(name: str, array: np.ndarray) -> Any:
    return lambda stored, arrays: arrays.update({name: array})


def field(name: str, value: Any) -> Any:
    return lambda stored, arrays: stored["report"]["result"].update({name: value})


GRID = "result.inner[0].grid"
WRONG = {
    "another dtype": replaced(GRID, np.zeros((3, 4), np.float64)),
    "another shape": replaced(GRID, np.zeros((3, 5), np.float32)),
    "another rank": replaced(GRID, np.zeros(12, np.float32)),
    "endless axis": replaced(GRID, np.zeros((packing.LONGEST_AXIS + 1, 0), np.float32)),
    "array too many": replaced("extra", np.zeros(1, np.float32)),
    "array missing": lambda stored, arrays: arrays.pop(GRID) is None,
    "array named twice": lambda stored, arrays: stored["report"]["result"]["inner"][1].update(
        grid={"$array": GRID}, name="x"
    ),
    "array as lists": lambda stored, arrays: stored["report"]["result"]["inner"][0].update(grid=[[0.0]]),
    "field too many": field("more", 1),
    "text for a number": field("count", "1"),
    "record for a number": field("score", {"a": 1}),
    "unknown part": field("score", {"$pickle": "x"}),
    "float of another name": field("score", {"$float": "1e5"}),
    "list for a record": field("inner", 3),
    "unknown probe": lambda stored, arrays: stored["report"].update(probe="os"),
    "probe that is none": lambda stored, arrays: stored["report"].update(probe=["os"]),
    "no report": lambda stored, arrays: stored.update(report=None),
    "another format": lambda stored, arrays: stored.update(format=99),
    "NaN in the text": lambda stored, arrays: json.dumps(stored).replace(str(1 / 3), "NaN"),
    "no JSON": lambda stored, arrays: "{",
    "a list": lambda stored, arrays: "[]",
    "deep": lambda stored, arrays: "[" * 200_000,
    "endless number": lambda stored, arrays: json.dumps(stored).replace(str(1 / 3), "9" * 5000),
    "large number": lambda stored, arrays: json.dumps(stored).replace(str(1 / 3), "9" * 4000),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_file_that_is_no_report_is_refused_in_a_sentence(made: Report, change: Any) -> None:
    data = forged(made, change)
    with pytest.raises(DataError) as found:
        unpack(data)
    text = str(found.value)
    assert text.endswith((".", "it.")) and "\n" not in text and len(text) < 600


def header(text: bytes, rest: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + rest


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 99 << 20),
        header(b"{}"),
        header(b'{"__metadata__":{"other":"x"}}'),
        header(b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}', b"\0\0"),
        header(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,4]}}', b"\0" * 4),
        header(b'{"a":{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,4]}}', b"\0" * 4),
        b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",  # a pickle
    ],
)
def test_bytes_that_are_no_file_are_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        unpack(data)


@examples(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_bytes_never_raise_anything_else(made: Report, data: st.DataObject) -> None:
    whole = bytearray(pack(made))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=6)):
        whole[at] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole)
    try:
        unpack(damaged)
    except DataError as error:
        assert "\n" not in str(error)


def test_sizes_are_limited(made: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack(made)
    for name, most in (("MOST_BYTES", 1000), ("MOST_JSON", 1000)):
        with monkeypatch.context() as smaller:
            smaller.setattr(packing, name, most)
            with pytest.raises(DataError, match="too large to be kept"):
                pack(made) if name == "MOST_JSON" else pack(big(made))
            with pytest.raises(DataError, match="at most"):
                unpack(data)
    monkeypatch.setattr(packing, "MOST_ARRAYS", 5)
    with pytest.raises(DataError, match="at most 5 arrays"):
        unpack(data)


def big(made: Report) -> Report:
    return dataclasses.replace(made, result=dataclasses.replace(made.result, inner=(made_probe.inner(40, 40),)))
