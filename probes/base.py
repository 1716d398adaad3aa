"""What all probes share: records that go to JSON and back unchanged, the report and its protocol.

An array field is annotated with its axes and unit (see `Array`); arrays of one record agree on every axis.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import numpy as np

from engram_lab.models.errors import DataError, LabError
from engram_lab.probes import module_of

if TYPE_CHECKING:
    from engram_lab.models.handle import Handle

# Told the fraction done, 0 to 1, and what is being done; it may raise models.errors.Cancelled to stop.
Progress = Callable[[float, str], None]


def part(progress: Progress | None, begin: float, end: float) -> Progress:
    """The progress of a part that goes from the fraction `begin` to `end` of the whole, told as that of the whole."""

    def tell(fraction: float, doing: str) -> None:
        if progress is not None:
            progress((1 - fraction) * begin + fraction * end, doing)

    return tell


def check_handles(handles: Sequence[Handle], number: int) -> None:
    """LabError unless there are as many open models as a request names."""
    if len(handles) != number:
        named = "one model" if number == 1 else f"{number} models"
        raise LabError(f"The request names {named}, and {len(handles)} were given.")


def only(handles: Sequence[Handle]) -> Handle:
    """The open model of a request of one; LabError for more, or none."""
    check_handles(handles, 1)
    return handles[0]


MOST_DRAWN = 1_000_000


def check_seed(seed: int, number: int, of: str = "bootstrap resamples") -> None:
    """LabError for a seed that is not of 63 bits, and for none or more than MOST_DRAWN of what is drawn with it."""
    if seed < 0 or number < 1:
        raise LabError(f"The seed must be 0 or more, and the number of {of} 1 or more.")
    if seed >= 2**63 or number > MOST_DRAWN:
        raise LabError(f"The seed must be below 2**63, and the number of {of} at most {MOST_DRAWN:,}.")


# What a field of a result stands for, by which two runs are compared (lab.sessions.compare):
#   amount   a number, a truth value or a text that must be the same
#   name     an id, a position and the like, which names a thing: a difference says nothing
#   spelled  the text of tokens that won a ranking, which turns with it where two are nearly as likely
#   prose    a sentence of the probe's own on its figures, which rounds them: its numbers are fields as well
#   hash     of bits: equal or not, whatever the distance
Role = Literal["amount", "name", "spelled", "prose", "hash"]


def role(of: Role) -> dict[str, Role]:
    """The metadata by which a field that is no array says its role: `layer: int = field(metadata=role("name"))`."""
    return {"role": of}


# Metadata of a field that came after reports were kept: it is written where it says something, and those stay the same.
LATER = {"later": True}


@dataclass(frozen=True)
class Array:
    """What an array field holds: `kl: Annotated[np.ndarray, Array("layer", "pos", unit="nats")]`.

    The unit is empty for counts, ids and truth values. ranks: the field beside it that names what the values belong
    to, where they are ranked from the largest down.
    """

    axes: tuple[str, ...]
    unit: str
    dtype: str
    role: Role
    ranks: str

    def __init__(
        self, *axes: str, unit: str = "", dtype: str = "float32", role: Role = "amount", ranks: str = ""
    ) -> None:
        for name, value in (("axes", axes), ("unit", unit), ("dtype", dtype), ("role", role), ("ranks", ranks)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, eq=False)
class Record:
    """Base of frozen dataclasses (declare them with eq=False) whose fields go to JSON and back.

    Fields are numbers, strings, arrays, other records, and tuples or dictionaries of these; NaN is null.
    """

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for name, array in arrays_of(type(self)).items():
            value = getattr(self, name)
            if value is None:
                continue
            if value.dtype != array.dtype or value.ndim != len(array.axes):
                raise ValueError(f"{name} is {value.dtype}{list(value.shape)}, not {array.dtype}{array.axes}")
            for axis, size in zip(array.axes, value.shape, strict=True):
                if sizes.setdefault(axis, size) != size:
                    raise ValueError(f"{name} has {size} along {axis}, another field {sizes[axis]}")
            value.flags.writeable = False

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dictionaries and numbers; json.dumps(allow_nan=False) takes them."""
        held = ((item, getattr(self, item.name)) for item in dataclasses.fields(self))
        return {item.name: _plain(v) for item, v in held if not ("later" in item.metadata and _same(v, item.default))}

    @classmethod
    def from_dict(cls, stored: Any) -> Self:
        """The record that `to_dict` gave; DataError for one that does not fit."""
        hints = typing.get_type_hints(cls, include_extras=True)
        if not isinstance(stored, dict) or not stored.keys() <= hints.keys():
            extra = sorted(set(stored) - set(hints)) if isinstance(stored, dict) else type(stored).__name__
            raise DataError(f"This is no {cls.__name__} of this version of the lab: it has {extra}.")
        try:
            return cls(**{name: _typed(value, hints[name]) for name, value in stored.items()})
        except DataError:
            raise
        except (LabError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"This {cls.__name__} is damaged or of another version: {error}.") from error

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, item.name), getattr(other, item.name)) for item in dataclasses.fields(self))

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, np.ndarray):
        return _plain_array(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value != value:
        return None
    return value


def _plain_array(value: np.ndarray) -> list:
    """Nested lists; a float32 as the shortest decimal that gives it back, half the digits of its double."""
    if value.dtype == np.float32:
        short = value.astype("U24").astype(np.float64)
        again = (short.astype(np.float32) == value) | np.isnan(value)
        value = np.where(again, short, value.astype(np.float64))
    if value.dtype.kind == "f" and np.isnan(value).any():
        objects = value.astype(object)
        objects[np.isnan(value)] = None
        value = objects
    return value.tolist()


def _typed(value: Any, hint: Any) -> Any:
    """`value` from JSON as the annotated type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return None if value is None else _typed_array(value, arguments[1])
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _typed(value, hint)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is not a list")
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_typed(item, kind) for item, kind in zip(value, kinds, strict=True))
    if origin is dict:
        return {arguments[0](key): _typed(item, arguments[1]) for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.from_dict(value)
    if hint is float and not isinstance(value, bool):
        return float("nan") if value is None else float(value)
    if hint in (int, str, bool) and type(value) is not hint:
        raise TypeError(f"{value!r} is not {hint.__name__}")
    return value


def _typed_array(value: Any, array: Array) -> np.ndarray:
    made = np.array(value, dtype=array.dtype)  # null becomes NaN
    # Of an empty one the lists tell only the leading axes.
    return made if made.size else made.reshape(made.shape + (0,) * (len(array.axes) - made.ndim))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if type(a) is not type(b):
            return False
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or (a != a and b != b)


def arrays_of(kind: type[Record]) -> dict[str, Array]:
    """The array fields of a record and what they hold."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if typing.get_origin(hint) is typing.Annotated}


def held_by(kind: type[Record]) -> dict[str, Array]:
    """Each field of a record -> what it holds; of one that is no array only the role is said."""
    others = {item.name: Array(role=item.metadata.get("role", "amount")) for item in dataclasses.fields(kind)}
    return others | arrays_of(kind)


@dataclass(frozen=True, eq=False)
class Timing(Record):
    """Base of what was measured in seconds: no two runs agree on it, so that any two are equal."""

    rounds: int  # of which the shortest counts
    threads: int

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


@dataclass(frozen=True, eq=False)
class ModelProtocol(Record):
    """Which model, exactly, and how it ran."""

    name: str
    fingerprint: str
    device: str
    dtype: str
    n_layers: int


@dataclass(frozen=True, eq=False)
class Protocol(Record):
    """What it takes to have the same numbers again: no dates, no durations.

    prompt_ids[model][prompt]: the token ids that the model got.
    """

    models: tuple[ModelProtocol, ...]
    prompt_ids: tuple[tuple[tuple[int, ...], ...], ...]
    seed: int
    versions: dict[str, str]

    @classmethod
    def of(cls, handles: Sequence[Handle], prompt_ids: Sequence[Sequence[Sequence[int]]], seed: int) -> Protocol:
        """The protocol of a run of these models on these prompts, ids [model][prompt][pos]."""
        models = tuple(
            ModelProtocol(h.name, h.fingerprint, str(h.device), str(h.dtype).removeprefix("torch."), h.n_layers)
            for h in handles
        )
        ids = tuple(tuple(tuple(prompt) for prompt in prompts) for prompts in prompt_ids)
        return cls(models, ids, seed, versions())


Config = TypeVar("Config", bound=Record, covariant=True)
Result = TypeVar("Result", bound=Record, covariant=True)


def versions() -> dict[str, str]:
    """Releases of what computes the numbers; "source" for one that runs without being installed."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "nnsight", "numpy", "engram-lab"):
        try:
            release = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            release = "source"
        found[name.replace("-", "_")] = release
    return found


@dataclass(frozen=True, eq=False)
class Report(Record, Generic[Config, Result]):
    """What every probe returns and every export holds, with just these keys.

    `Report[LensConfig, LensResult]` is a report of the lens: mypy knows the fields of its config and its result. Of a
    bare `Report`, of any probe, it knows nothing.
    """

    probe: str
    config: Config
    protocol: Protocol
    result: Result

    def to_json(self) -> str:
        """One line of JSON; the same request gives the same bytes."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, stored: Any) -> Self:
        """The report of any probe of the lab; DataError for anything else."""
        if not isinstance(stored, dict) or set(stored) != {"probe", "config", "protocol", "result"}:
            raise DataError("This is no report of the lab: it needs the keys probe, config, protocol, result.")
        try:
            module = module_of(str(stored["probe"]))
        except LookupError as error:
            raise DataError(str(error)) from None
        return cls(
            stored["probe"],
            module.CONFIG.from_dict(stored["config"]),
            Protocol.from_dict(stored["protocol"]),
            module.RESULT.from_dict(stored["result"]),
        )
