"""Reading safetensors straight into the tensors that a model will own, and the fingerprint of what was read.

transformers maps the file into memory instead. Then a checkpoint saved over a loaded one changes or kills the
running model, and a bf16 file read as fp32 needs 1.5 x the memory; reading costs one pass, which also hashes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from engram_lab.models.errors import CheckpointError
from engram_lab.models.files import load_json

if TYPE_CHECKING:
    from hashlib import _Hash

    from transformers import PreTrainedModel

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Keys of a configuration that say how a model was saved, not what it computes.
_INCIDENTAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
_CHUNK = 1 << 20  # elements converted at a time: bounds the memory beside the weights
_SMALL = 1 << 16  # elements of a tensor that is read as it is stored


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int  # bytes


def read_header(file: Path) -> dict[str, Entry]:
    """Tensor name -> Entry; CheckpointError if the file is truncated or not safetensors."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, 100 << 20):
            raise CheckpointError(f"{file} is not a safetensors file, or cut off in its header: copy it again.")
        try:
            header = load_json(stream.read(length))
            header.pop("__metadata__", None)
            entries = {name: _entry(file, 8 + length, item) for name, item in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{file} is not a safetensors file: its header cannot be read.") from error
    end = max((entry.start + entry.size for entry in entries.values()), default=8 + length)
    if end != size:
        raise CheckpointError(f"{file} has {size} bytes where its header says {end}: copy it again.")
    return entries


def _entry(file: Path, base: int, item: dict[str, Any]) -> Entry:
    (start, end), shape = item["data_offsets"], item["shape"]
    if not all(type(n) is int and n >= 0 for n in (start, end, *shape)) or not isinstance(item["dtype"], str):
        raise ValueError(f"{item} is no place of a tensor")
    return Entry(file, item["dtype"], tuple(shape), base + start, end - start)


def read_headers(files: Iterable[Path]) -> dict[str, Entry]:
    """Tensor name -> Entry over all files of a checkpoint."""
    entries: dict[str, Entry] = {}
    for file in files:
        entries |= read_header(file)
    return entries


def stored_dtype(entries: Mapping[str, Entry]) -> torch.dtype | None:
    """The dtype of the largest tensor (None if it is not one that this module reads)."""
    largest = max(entries.values(), key=lambda entry: entry.size, default=None)
    return DTYPES.get(largest.dtype) if largest is not None else None


def read_tensors(
    entries: Mapping[str, Entry],
    dtype: torch.dtype,
    digest: _Hash,
    as_stored: Callable[[str], object] | None = None,
) -> dict[str, Tensor]:
    """All tensors, large floating ones as `dtype`, others as stored; `digest` takes in names, shapes and bytes.

    What is small stays as it is: a model may keep it in float32 (a router's bias, a decay), and what was rounded once
    does not come back. So do those that `as_stored` names. Peak memory is that of the result plus a few MB.
    CheckpointError for a dtype that is not known.
    """
    out: dict[str, Tensor] = {}
    streams: dict[Path, BinaryIO] = {}
    try:
        for name in sorted(entries):
            entry = entries[name]
            if entry.file not in streams:
                streams[entry.file] = entry.file.open("rb", buffering=0)
            source = DTYPES.get(entry.dtype)
            small = math.prod(entry.shape) <= _SMALL or (as_stored is not None and as_stored(name))
            into = source if source is None or small or not source.is_floating_point else dtype
            out[name] = _read_one(streams[entry.file], name, entry, into, digest)
    finally:
        for stream in streams.values():
            stream.close()
    return out


def hash_tensors(entries: Mapping[str, Entry], digest: _Hash) -> None:
    """Let `digest` take in what read_tensors would, for weights that transformers reads itself."""
    for name in sorted(entries):
        entry = entries[name]
        digest.update(_label(name, entry.dtype, entry.shape))
        with entry.file.open("rb", buffering=0) as stream:
            stream.seek(entry.start)
            for start in range(0, entry.size, 1 << 22):
                digest.update(stream.read(min(1 << 22, entry.size - start)))


def _read_one(stream: BinaryIO, name: str, entry: Entry, into: torch.dtype | None, digest: _Hash) -> Tensor:
    source = DTYPES.get(entry.dtype)
    if source is None:
        raise CheckpointError(f"{entry.file} stores {name} as {entry.dtype}, which this lab does not read.")
    tensor = torch.empty(entry.shape, dtype=into)
    flat = tensor.view(-1)
    if flat.numel() * source.itemsize != entry.size:
        raise CheckpointError(f"{entry.file}: the shape of {name} does not fit its {entry.size} bytes.")
    digest.update(_label(name, entry.dtype, entry.shape))
    stream.seek(entry.start)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        raw = part if tensor.dtype == source else torch.empty(part.shape, dtype=source)
        view = _bytes_of(raw)
        done = 0
        while done < len(view):
            got = stream.readinto(view[done:])  # type: ignore[attr-defined]
            if not got:
                raise CheckpointError(f"{entry.file} ended while {name} was read: copy it again.")
            done += got
        digest.update(view)
        if raw is not part:
            part.copy_(raw)
    return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()  # numpy has no bfloat16
    return memoryview(array)


def _label(name: str, dtype: str, shape: Iterable[int]) -> bytes:
    return f"\n{name} {dtype} {list(shape)}\n".encode()


def config_digest(config: Mapping[str, Any]) -> _Hash:
    """A sha256 that has taken in what the configuration says about the computation."""
    essentials = {key: value for key, value in config.items() if key not in _INCIDENTAL}
    return hashlib.sha256(json.dumps(essentials, sort_keys=True, default=str).encode())


def short(digest: _Hash) -> str:
    """The first 16 hex characters."""
    return digest.hexdigest()[:16]


def file_fingerprint(file: Path) -> str:
    """16 hex characters of the sha256 of a whole file (a GGUF file holds configuration and weights)."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def module_fingerprint(model: PreTrainedModel) -> str:
    """The fingerprint of a module in memory: that of its saved checkpoint, unless saving renames tensors."""
    digest = config_digest(json.loads(model.config.to_json_string()))
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen and tensor.numel():  # tied to one before, so not saved
            continue
        seen.add(tensor.data_ptr())
        tensors[name] = tensor
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(_label(name, NAMES[tensor.dtype], tensor.shape))
        digest.update(_bytes_of(tensor))
    return short(digest)
