"""A report as the bytes of one safetensors file, and back: arrays as tensors, the rest as JSON in its metadata.

An array's place in the JSON holds {"$array": name}, a float that JSON has no word for {"$float": "nan"}; a key of
ours that starts with "$" gets another. The name of a tensor is the array's path, such as result.models[0].kl.
The same report gives the same bytes.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from engram_lab.models.errors import DataError, LabError
from engram_lab.probes.base import Record, Report

FORMAT = 1
MOST_BYTES = 1 << 30  # of a packed report
MOST_JSON = 64 << 20  # characters; safetensors itself reads no header above 100 MB
MOST_ARRAYS = 100_000
LONGEST_AXIS = 1 << 27  # an axis may be long where another is empty: loops over it would not end
_PART = "$"
_TIGHT = (",", ":")


def pack(report: Report) -> bytes:
    """The safetensors file of a report; DataError for one that is larger than `unpack` takes."""
    arrays: dict[str, np.ndarray] = {}
    plain = {"format": FORMAT, "report": split(report, "", arrays)}
    text = json.dumps(plain, separators=_TIGHT, allow_nan=False)  # keys in their order, as in the report's own JSON
    if len(text) > MOST_JSON or sum(array.nbytes for array in arrays.values()) > MOST_BYTES // 2:
        raise DataError(f"This {report.probe} report is too large to be kept: run it on less text at once.")
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    data: bytes = save(dense, {"report": text})
    return data


def unpack(data: bytes) -> Report:
    """The report of bytes that `pack` gave; DataError for any others, with what is wrong with them."""
    if len(data) > MOST_BYTES:
        raise DataError(f"A packed report has at most {MOST_BYTES >> 20} MB; this one has {len(data) >> 20}.")
    try:
        arrays = load(data)  # checks that the tensors' bytes are all there, once each
        stored = _metadata(data)
        _check(arrays, stored)
        report: Report = Report.from_dict(_joined(stored["report"], arrays))
        found: dict[str, np.ndarray] = {}
        split(report, "", found)
    except DataError:
        raise
    except (LabError, SafetensorError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"These bytes are no report of the lab ({_reason(error)}).") from error
    except (AssertionError, RecursionError, MemoryError) as error:  # records check themselves
        raise DataError(f"These bytes are no report of the lab ({_reason(error)}).") from error
    for name, array in arrays.items():
        if name not in found or found[name].dtype != array.dtype or found[name].shape != array.shape:
            raise DataError(
                f"This report has a {array.dtype} array {name[:200]!r} {list(array.shape)} where none fits."
            )
    return report


def canonical(plain: Any) -> str:
    """JSON with one spelling: keys sorted, no spaces, ASCII only (a lone surrogate is no UTF-8)."""
    return json.dumps(plain, sort_keys=True, separators=_TIGHT, allow_nan=False)


def split(value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    """`value` as plain JSON, with its arrays put into `arrays` under their paths."""
    if isinstance(value, np.ndarray):
        arrays[path] = value
        return {"$array": path}
    if isinstance(value, Record):
        inner = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return {name: split(item, f"{path}.{name}" if path else name, arrays) for name, item in inner.items()}
    if isinstance(value, dict):
        keys = {str(key): item for key, item in value.items()}
        return {_escaped(key): split(item, f"{path}[{json.dumps(key)}]", arrays) for key, item in keys.items()}
    if isinstance(value, tuple | list):
        return [split(item, f"{path}[{n}]", arrays) for n, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(float(value))}
    return value


def _joined(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The inverse of `split`, up to the types, which the records know."""
    if isinstance(value, list):
        return [_joined(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$array"}:
        return arrays[value["$array"]]
    if value.keys() == {"$float"}:
        if value["$float"] not in ("nan", "inf", "-inf"):
            raise ValueError("a float that is none")
        return float(value["$float"])
    return {_unescaped(key): _joined(item, arrays) for key, item in value.items()}


def _escaped(key: str) -> str:
    return _PART + key if key.startswith(_PART) else key


def _unescaped(key: str) -> str:
    if key.startswith(_PART) and not key.startswith(_PART * 2):
        raise ValueError(f"an unknown part {key[:40]!r}")
    return key[1:] if key.startswith(_PART) else key


def _metadata(data: bytes) -> dict[str, Any]:
    """The JSON beside the tensors; safetensors has already found the header to be one."""
    length = int.from_bytes(data[:8], "little")
    text = json.loads(data[8 : 8 + length])["__metadata__"]["report"]
    if len(text) > MOST_JSON:
        raise DataError(f"A packed report has at most {MOST_JSON >> 20} MB of text; this one has more.")
    stored = json.loads(text, parse_constant=_no_constant)
    if not isinstance(stored, dict) or stored.keys() != {"format", "report"}:
        raise DataError("These bytes are no report of the lab: the file has another content.")
    if stored["format"] != FORMAT:
        raise DataError(
            f"This report has format {str(stored['format'])[:20]}, this version of the lab reads {FORMAT}: update it."
        )
    return stored


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _check(arrays: dict[str, np.ndarray], stored: dict[str, Any]) -> None:
    """Counts and axes that no report has."""
    if len(arrays) > MOST_ARRAYS:
        raise DataError(f"A report has at most {MOST_ARRAYS} arrays; this one has {len(arrays)}.")
    for name, array in arrays.items():
        if array.ndim > 16 or max(array.shape, default=0) > LONGEST_AXIS:
            raise DataError(f"The array {name[:200]!r} of this report is larger than any of the lab.")


def _reason(error: BaseException) -> str:
    """The first line of an error, short enough to stand in a sentence."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(".: ")
