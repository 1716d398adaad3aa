"""The scenarios that ship, a user's own, and how one is asked for on the command line; light imports."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import flags as arguments
from engram_lab.lab.ask.texts import lines_of
from engram_lab.models.files import load_json

if TYPE_CHECKING:
    from engram_lab.probes.kv.scenario import Scenario

LIBRARY = Path(__file__).resolve().parents[2] / "assets" / "kv" / "scenarios.jsonl"
FILE = "scenarios.jsonl"  # where an exported command reads scenarios that do not ship
_NEEDED = ("template", "old", "new", "answer_old", "answer_new")
_TEXTS = (*_NEEDED, "id", "kind", "question", "distractors", "erratum", "irrelevant", "wrong", "third")


@cache
def library() -> tuple[Scenario, ...]:
    """The scenarios that we wrote, the default first."""
    return read(LIBRARY.read_bytes(), LIBRARY.name)


def find(name: str, among: Sequence[Scenario]) -> Scenario:
    """The scenario with an id; DataError if there is none."""
    from engram_lab.models.errors import DataError

    for scenario in among:
        if scenario.id == name:
            return scenario
    raise DataError(f'There is no scenario "{name}"; there are: {", ".join(s.id for s in among)}.')


def read(raw: bytes, name: str) -> tuple[Scenario, ...]:
    """The scenarios of a .jsonl, an object a line; DataError that names the line for what is none."""
    from engram_lab.models.errors import DataError
    from engram_lab.probes.kv.scenario import Scenario

    found: dict[str, Scenario] = {}
    for n, line in enumerate(lines_of(raw, name), 1):
        try:
            stored: dict[str, Any] = load_json(line)
        except ValueError:
            stored = {}
        if not isinstance(stored, dict) or any(not isinstance(stored.get(key), str) for key in _NEEDED):
            raise DataError(f"{name} has no JSON object with the texts {', '.join(_NEEDED)} as its scenario {n}.")
        stored = {"id": str(n)} | stored
        wrong = [key for key, value in stored.items() if type(value) is not (bool if key == "chat" else str)]
        if unknown := [*wrong, *(stored.keys() - {*_TEXTS, "chat"})]:
            raise DataError(
                f'Scenario {n} of {name} has "{unknown[0]}", which is not read so: a scenario has the texts '
                f'{", ".join(_TEXTS)}, and "chat", true or false.'
            )
        scenario = Scenario.from_dict(stored)
        if scenario.id in found:
            raise DataError(f'{name} has two scenarios with the id "{scenario.id}": give each its own.')
        found[scenario.id] = scenario
    return tuple(found.values())


def written(scenarios: Sequence[Scenario]) -> str:
    """Scenarios as the .jsonl that `read` takes."""
    return "".join(json.dumps(_changed(scenario), ensure_ascii=False) + "\n" for scenario in scenarios)


def _changed(scenario: Scenario) -> dict[str, Any]:
    """The fields that are not as by default, and the id."""
    return {
        item.name: getattr(scenario, item.name)
        for item in dataclasses.fields(scenario)
        if item.name == "id" or getattr(scenario, item.name) != item.default
    }


# --- On the command line -------------------------------------------------------------------------------------------


def add_align(parser: argparse.ArgumentParser) -> None:
    """--align."""
    parser.add_argument(
        "--align",
        default="refuse",
        choices=("refuse", "split"),
        help="values of different token length: refuse, or split the shorter one's tokens (default %(default)s)",
    )


def add_scenario(parser: argparse.ArgumentParser) -> None:
    """One scenario: one that ships, one of a file, or one of your own, field by field; and --align."""
    parser.add_argument("--scenario", metavar="ID", help="one that ships, or of --scenarios (default: the first)")
    parser.add_argument("--scenarios", type=Path, metavar="FILE", help="a .jsonl with your own scenarios")
    own = parser.add_argument_group("a scenario of your own, or what to change of the one named")
    for name in _TEXTS:
        what = "the text, with {field} once" if name == "template" else None
        own.add_argument(f"--{name.replace('_', '-')}", metavar="TEXT", help=what)
    own.add_argument("--chat", action="store_true", help="as a user's message in the model's chat template")
    add_align(parser)


def scenario_of(args: argparse.Namespace) -> Scenario:
    """The scenario of a request."""
    from engram_lab.models.errors import DataError
    from engram_lab.probes.kv.scenario import Scenario

    given = {name: getattr(args, name) for name in _TEXTS if getattr(args, name) is not None}
    if args.chat:
        given["chat"] = True
    if args.scenario is None and args.scenarios is None and "template" in given:
        if missing := [name for name in _NEEDED if name not in given]:
            raise DataError(f"A scenario of your own needs --{missing[0].replace('_', '-')} too.")
        return Scenario(**given)
    among = library() if args.scenarios is None else read(args.scenarios.read_bytes(), str(args.scenarios))
    return dataclasses.replace(among[0] if args.scenario is None else find(args.scenario, among), **given)


def scenario_flags(scenario: Scenario, align: str = "refuse") -> list[str]:
    """The flags of a scenario: its id if it ships, else every field."""
    chat = ["--chat"] if scenario.chat else []
    plain = dataclasses.replace(scenario, chat=False)
    if any(dataclasses.replace(known, chat=False) == plain for known in library() if known.chat <= scenario.chat):
        flags = [arguments.flag("scenario", scenario.id)]
    else:
        fields = _changed(plain)
        flags = [arguments.flag(name.replace("_", "-"), value) for name, value in fields.items()]
    return [*flags, *chat, *([arguments.flag("align", align)] if align != "refuse" else [])]
