"""One description of a request: its flags, the config they make, the flags again, files, and the widgets of its page.

A front has ASK, an Ask of one Part for each field of the probe's Config, or for a few fields that are asked for
together. A part is the only place that knows the flag, its words, its default, and the widget and its bounds.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NoReturn

from engram_lab.lab.ask.flags import flag as flag
from engram_lab.lab.ask.view import LARGEST_FILE, View, is_plain
from engram_lab.models.errors import LabError
from engram_lab.probes import running

File = tuple[str, bytes]


def refuse(what: str) -> NoReturn:
    """LabError for a request that no setting of its page makes."""
    raise LabError(
        f"Its page has no setting for {what}: this run can be shown and run again, but not opened on its page."
    )


def flag_of_several(name: str, values: Sequence[Any]) -> str:
    """One option with several values after it."""
    return " ".join([f"--{name}", *(shlex.quote(str(value)) for value in values)])


def word_of(what: str, value: Any, words: Mapping[str, Any]) -> str:
    """The word that stands for a value on the page."""
    for word, known in words.items():
        if known == value:
            return word
    refuse(f"{what} {value!r}")


def in_order(what: str, values: Sequence[Any], offered: Collection[Any]) -> list[Any]:
    """Values of a choice of several whose request has them in the order in which they are offered."""
    if list(values) != [value for value in offered if value in values]:
        refuse(f"the {what} {', '.join(map(str, values))} in this order: it offers {', '.join(map(str, offered))}")
    return list(values)


@dataclass(frozen=True)
class Part:
    """One field of a request, of which nothing is a flag and nothing a widget: it has to be as by default."""

    uploads: ClassVar[tuple[str, ...]] = ()  # keys of the uploaders that `brought` may fill
    field: str
    help: str = ""
    default: Any = None
    key: str | None = None  # of the widget that asks for it; None: the page asks for it nowhere
    what: str = ""  # what it is called where it is refused
    _: KW_ONLY
    label: str = ""  # of the widget
    tip: str | None = None  # its help

    @property
    def name(self) -> str:
        """Of the flag."""
        return self.field.replace("_", "-")

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The fields of the config, from the flags; LabError for what cannot be."""
        return {}

    def flags(self, config: Any) -> list[str]:
        """The flags that make the fields again."""
        return []

    def files(self, config: Any) -> dict[str, str]:
        """The files that the flags name: name -> text."""
        return {}

    def view(self, config: Any) -> dict[str, Any]:
        """The widgets that make the fields on the page; LabError where none do."""
        value = getattr(config, self.field)
        if self.key is None:
            if value != self.default:
                words = f"{self.field.replace('_', ' ')} {value!r}"
                refuse(words if len(words) <= 80 else f"{words[:79]}…")
            return {}
        return {self.key: self.shown(value)}

    def shown(self, value: Any) -> Any:
        """A value as its widget has it; LabError for one that it does not take."""
        return value

    def brought(self, config: Any) -> dict[str, File]:
        """The files that are brought to the page, by the keys of their uploaders."""
        return {}


@dataclass(frozen=True)
class Flag(Part):
    """A field with a flag of one value: a text, unless a subclass says otherwise."""

    required: bool = False
    metavar: str | None = None

    def kind(self) -> dict[str, Any]:
        """What argparse is told beside the default."""
        return {"required": self.required, "metavar": self.metavar}

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Add the flag."""
        parser.add_argument(f"--{self.name}", **{"default": self.default, "help": self.help} | self.kind())

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The field."""
        return {self.field: getattr(args, self.name.replace("-", "_"))}

    def flags(self, config: Any) -> list[str]:
        """The flag, if there is a value."""
        value = getattr(config, self.field)
        return [] if value is None else [flag(self.name, value)]


@dataclass(frozen=True)
class Text(Flag):
    """A text; an empty one on the page is none."""

    def shown(self, value: str | None) -> str:
        """The text of the box."""
        return value or ""


@dataclass(frozen=True)
class Ours(Flag):
    """A text that is ours unless another is given."""

    ours: Callable[[], str] = str

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The text."""
        given = getattr(args, self.name)
        return {self.field: self.ours() if given is None else given}

    def flags(self, config: Any) -> list[str]:
        """The flag for another text."""
        return super().flags(config) if getattr(config, self.field) != self.ours() else []


@dataclass(frozen=True)
class Number(Flag):
    """A whole number from low to high; the page's own bounds, where the model sets them, are not known here."""

    low: int | None = None
    high: int = 2**31 - 1
    kind_of: type = int
    step: int = 1  # of the box

    def kind(self) -> dict[str, Any]:
        """A number."""
        return {"type": self.kind_of}

    def shown(self, value: int) -> int:
        """The number, if the box takes it."""
        if self.low is not None and not self.low <= value <= self.high:
            refuse(f"{self.what} of {value}, only for {self.low} to {self.high}")
        return value


@dataclass(frozen=True)
class Choice(Flag):
    """One of several, by the words of the page."""

    words: Mapping[str, str] | None = None

    def kind(self) -> dict[str, Any]:
        """The values that may be chosen."""
        return {"choices": tuple((self.words or {}).values())}

    def shown(self, value: str) -> str:
        """The word of the page."""
        return word_of(self.what, value, self.words or {})


@dataclass(frozen=True)
class Switch(Flag):
    """On with its flag."""

    default: bool = False

    def kind(self) -> dict[str, Any]:
        """No value."""
        return {"action": "store_true"}

    def flags(self, config: Any) -> list[str]:
        """The flag where it is on."""
        return [f"--{self.name}"] if getattr(config, self.field) else []


@dataclass(frozen=True)
class Numbers(Flag):
    """Several whole numbers after one flag, in the order in which `offered` has them (None: rising)."""

    offered: Sequence[int] | None = None
    least: str = "+"

    def kind(self) -> dict[str, Any]:
        """Several numbers."""
        return {"type": int, "nargs": self.least, "metavar": "N"}

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """A tuple of them, or None."""
        value = getattr(args, self.field)
        return {self.field: None if value is None else tuple(value)}

    def flags(self, config: Any) -> list[str]:
        """The flag with the numbers, unless there is none to be given."""
        value = getattr(config, self.field)
        return [] if value is None or (self.least == "+" and not value) else [flag_of_several(self.name, value)]

    def shown(self, value: Sequence[int] | None) -> list[int]:
        """The choice of several."""
        value = value or ()
        return in_order(self.what, value, sorted(value) if self.offered is None else self.offered)


@dataclass(frozen=True)
class Repeated(Flag):
    """A flag that may be repeated, each time with one value; `ours` are the values without any."""

    flag: str = ""
    ours: Callable[[], Sequence[Any]] = tuple
    kind_of: type = str

    @property
    def name(self) -> str:
        """Of the flag, whose field has the plural."""
        return self.flag

    def kind(self) -> dict[str, Any]:
        """A list."""
        kind = {} if self.kind_of is str else {"type": self.kind_of}
        return {"action": "append", "metavar": self.metavar, **kind}

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """All values that were given, or ours."""
        return {self.field: tuple(getattr(args, self.name.replace("-", "_")) or self.ours())}

    def flags(self, config: Any) -> list[str]:
        """The flag for each."""
        return [flag(self.name, value) for value in getattr(config, self.field)]


@dataclass(frozen=True)
class Ask:
    """How a probe is asked for."""

    probe: str
    page: str  # by its path in the URL
    parts: tuple[Part, ...]
    make: Callable[..., Any] | None = None  # the config of the fields; None: the probe's CONFIG

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The flags of the request."""
        for part in self.parts:
            part.add(parser)

    def config(self, args: argparse.Namespace) -> Any:
        """The request; LabError or OSError where flags or files do not make one."""
        fields: dict[str, Any] = {}
        for part in self.parts:
            fields |= part.read(args)
        return (self.make or running.module_of(self.probe).CONFIG)(**fields)

    def options(self, config: Any) -> list[str]:
        """The flags that make the request again, as a shell reads them."""
        return [option for part in self.parts for option in part.flags(config)]

    def files(self, config: Any) -> dict[str, str]:
        """The files that the flags name: name -> text."""
        return {name: text for part in self.parts for name, text in part.files(config).items()}

    def widgets(self, config: Any) -> dict[str, Any]:
        """The widgets of the page that make the request again, by their keys."""
        return {key: value for part in self.parts for key, value in part.view(config).items()}

    def view(self, config: Any) -> View:
        """The page of the request; LabError where no setting of it makes the request."""
        shown = self.widgets(config)
        files = {key: file for part in self.parts for key, file in part.brought(config).items()}
        if any(len(raw) > LARGEST_FILE for _, raw in files.values()):
            refuse(f"texts of more than {LARGEST_FILE >> 20} MB")
        if not all(map(is_plain, shown.values())):
            refuse("a text or a list that is so long")
        return View(self.page, shown, files)
