"""A sweep: a grid of models, prompts and settings over any probe, read from a YAML file.

The options are those of `engram-lab probe PROBE --help` without the dashes. A list is an axis of the grid, a scalar is
the same in every cell, null leaves the option out; an option that is repeated or takes several values has them in a
list inside the list: `control: [["off"], ["off", "zeroed"]]` are two cells. Text stands in quotes where YAML would read
a number, a date, or off, on, yes, no. Paths are relative to the file. `models` and `prompts` beside `options` are short
for the axes model and prompt. lab/command/sweep.py has an example.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from engram_lab.lab.ask.flags import BadUsageError, Options, StrictParser
from engram_lab.lab.fronts import FRONTS, front
from engram_lab.models.pool import ModelKey

MOST_CELLS = 10_000
_KEYS = ("probe", "name", "note", "tags", "out", "options", "models", "prompts")
_SHORT = {"models": "model", "prompts": "prompt"}
_PATHS = ("FILE", "NAME=FILE")  # how the help of a probe marks options that name a file


@dataclass(frozen=True)
class Cell:
    """One point of the grid: the options as the file has them, and the request that they make."""

    values: Mapping[str, Any]
    config: Any
    models: tuple[ModelKey, ...]

    @cached_property
    def key(self) -> str:
        """The same for two cells that ask for the same."""
        return json.dumps([self.config.to_dict(), [dataclasses.astuple(own) for own in self.models]], sort_keys=True)


@dataclass(frozen=True)
class Sweep:
    """A file that was read; `axes` are the options that vary, `cells` vary the last of them fastest."""

    probe: str
    name: str
    note: str | None
    tags: tuple[str, ...] | None
    out: Path | None
    axes: tuple[str, ...]
    cells: tuple[Cell, ...]


def read(path: Path) -> Sweep:
    """The sweep of a file, every cell's request made; DataError or OSError for one that cannot be served."""
    stored = _yaml(path)
    probe = stored.get("probe")
    if probe not in FRONTS:
        known = ", ".join(FRONTS)
        raise _error(path, f"names no probe: probe must be one of {known}" if probe is None else
                     f'names the probe "{probe}", which is none of {known}')  # fmt: skip
    name, note, tags, out = (stored.get(key) for key in ("name", "note", "tags", "out"))
    for key, value in (("name", name), ("note", note), ("out", out)):
        if value is not None and not isinstance(value, str):
            raise _error(path, f"has a {key} that is no text: write it in quotes")
    if tags is not None and not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        raise _error(path, "has tags that are no list of texts: write tags: [one, two]")
    options = _options(path, stored)
    axes = tuple(name for name, value in options.items() if isinstance(value, list))
    return Sweep(
        probe,
        path.stem if name is None else name,
        note,
        None if tags is None else tuple(tags),
        None if out is None else path.parent / out,
        tuple(axis for axis in axes if len(options[axis]) > 1),
        tuple(_cells(path, probe, options, axes)),
    )


def _error(path: Path, what: str) -> Exception:
    from engram_lab.models.errors import DataError

    return DataError(f"{path} {what}.")


class _Loader(yaml.SafeLoader):
    """yaml.safe_load, that refuses a key given twice: the first would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, "merge keys (<<) are not read: write the options out", key.start_mark
                )
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for n, key in enumerate(keys):
            if key in keys[:n]:
                where = node.value[n][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", where)
        return super().construct_mapping(node, deep)


def _plain_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """A whole number in digits; in YAML 1.1 010 is eight and 1:30 is ninety, which nobody means."""
    if not re.fullmatch(r"[-+]?(0|[1-9][0-9_]*)", node.value):
        raise yaml.constructor.ConstructorError(
            None, None, f'{node.value} is read as another number: write plain digits, or "{node.value}" for a text',
            node.start_mark,
        )  # fmt: skip
    return int(node.value.replace("_", ""))


_Loader.add_constructor("tag:yaml.org,2002:int", _plain_int)


def _yaml(path: Path) -> dict[str, Any]:
    try:
        stored = yaml.load(path.read_bytes(), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        raise _error(path, f"is no YAML{where} ({getattr(error, 'problem', None) or error})") from error
    if not isinstance(stored, dict):
        raise _error(path, "is no sweep: it needs the keys probe and options")
    if unknown := [key for key in stored if key not in _KEYS]:
        raise _error(path, f'has the key "{unknown[0]}", which is none of {", ".join(_KEYS)}')
    return stored


def _options(path: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The options of all cells, each a value or the list of an axis; the short keys first."""
    given = stored.get("options")
    if not isinstance(given, dict | None):
        raise _error(path, "has options that are no mapping: write one option a line, as model: engram-mini")
    found: dict[str, Any] = {}
    for short, name in _SHORT.items():
        if short in stored:
            if not isinstance(stored[short], list):
                raise _error(path, f"has {short} that are no list; the option of one value goes into options")
            if not stored[short]:
                raise _error(path, f"has the empty list {short}, which leaves nothing to run")
            if name in (given or {}):
                raise _error(path, f"has both {short} and the option {name}: keep one of them")
            found[name] = stored[short]
    for name, value in (given or {}).items():
        if value == []:
            raise _error(path, f"has the empty list {name}, which leaves nothing to run")
        found[str(name)] = value
    for name, value in found.items():
        texts = [json.dumps(item, default=str) for item in value] if isinstance(value, list) else []
        if twice := [text for n, text in enumerate(texts) if text in texts[:n]]:
            raise _error(path, f"has {twice[0]} twice in the list {name}")
    return found


def _cells(path: Path, probe: str, options: Mapping[str, Any], axes: tuple[str, ...]) -> Iterator[Cell]:
    """All cells, the last axis fastest."""
    n_cells = 1
    for axis in axes:
        n_cells *= len(options[axis])
    if n_cells > MOST_CELLS:
        raise _error(path, f"makes {n_cells} cells, more than {MOST_CELLS}: split it into several files")
    parser, known = _parser(probe)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}" if near else f"there are {', '.join(known)}"
            raise _error(path, f'has the option "{name}", which the probe {probe} has not; {hint}')
    for n, chosen in enumerate(itertools.product(*(options[axis] for axis in axes)), 1):
        values = {**options, **dict(zip(axes, chosen, strict=True))}
        try:
            yield _cell(parser, known, probe, values, path.parent.resolve())
        except (_BadCellError, OSError, ValueError) as error:
            raise _error(
                path, f"has a bad cell {n} of {n_cells}{_described(axes, values)}: {_reason(error)}"
            ) from error


def _parser(probe: str) -> tuple[StrictParser, dict[str, dict[str, Any]]]:
    """The parser of `engram-lab probe PROBE`, without its outputs, and what it is told of its options, by name."""
    parser = StrictParser(prog=f"engram-lab probe {probe}", allow_abbrev=False)
    front(probe).ASK.add_arguments(parser)
    options: Any = Options()
    front(probe).ASK.add_arguments(options)
    return parser, options.known


class _BadCellError(Exception):
    """What is wrong with the options of a cell."""


def _cell(
    parser: StrictParser, known: Mapping[str, Mapping[str, Any]], probe: str, values: dict[str, Any],
    folder: Path,
) -> Cell:  # fmt: skip
    from engram_lab.models.errors import LabError

    words = [word for name, value in values.items() for word in _words(name, value, known[name], folder)]
    try:
        args = parser.parse_args(words)
        config = front(probe).ASK.config(args)
    except (BadUsageError, LabError) as error:
        raise _BadCellError(str(error)) from error
    models = tuple(ModelKey(name, args.device, args.dtype, args.trust_remote_code) for name in config.models)
    return Cell(values, config, models)


def _words(name: str, value: Any, kind: Mapping[str, Any], folder: Path) -> list[str]:
    """An option as the command line has it; none for null, and for a switch that is off."""
    if value is None:
        return []
    if kind.get("action") == "store_true":
        if not isinstance(value, bool):
            raise _BadCellError(f"{name} is a switch: it must be true or false")
        return [f"--{name}"] if value else []
    several = value if isinstance(value, list) else [value]
    if len(several) != 1 and not (kind.get("action") == "append" or kind.get("nargs") in ("*", "+")):
        raise _BadCellError(f"{name} takes one value, not the list {value}")
    texts = [_text(name, item, kind, folder) for item in several]
    return [f"--{name}", *texts] if kind.get("nargs") in ("*", "+") else [f"--{name}={text}" for text in texts]


def _text(name: str, value: Any, kind: Mapping[str, Any], folder: Path) -> str:
    """One value as text; where text is wanted, only text, as 1.50 and off would come out as 1.5 and False."""
    if isinstance(value, list | dict):
        raise _BadCellError(f"{name} holds {value}, which is no single value")
    if not isinstance(value, str) and (kind.get("type") not in (int, float) or isinstance(value, bool)):
        raise _BadCellError(f'{name} is {value}, which YAML does not read as text: write it in quotes, as "..."')
    text = str(value)
    if kind.get("metavar") in _PATHS:
        before, equals, file = text.rpartition("=") if kind["metavar"] == "NAME=FILE" else ("", "", text)
        return f"{before}{equals}{folder / Path(file).expanduser()}"
    if name in ("model", "against"):
        return _model(text, folder)
    return text


def _model(name: str, folder: Path) -> str:
    """A shipped name or a hub id as it is; the path of a folder or file from where the sweep's own file lies."""
    from engram_lab.models.listing import FETCHABLE, SHIPPED

    path = folder / Path(name).expanduser()
    if not name.strip() or name in FETCHABLE or (SHIPPED / name / "config.json").is_file() or not path.exists():
        return name
    return str(path)


def _described(axes: tuple[str, ...], values: Mapping[str, Any]) -> str:
    """A cell by its place on the axes."""
    return f" ({', '.join(f'{axis} {shown(values[axis])}' for axis in axes)})" if axes else ""


def shown(value: Any, most: int = 40) -> str:
    """A value as one short line."""
    text = (
        "-"
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, default=str)
    )
    text = " ".join(text.split()) or '""'
    return text if len(text) <= most else f"{text[: most // 3]}…{text[most // 3 + 1 - most :]}"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"could not read {error.filename}: {error.strerror or error}"
    return str(error).rstrip(".")
