"""What the views of the experiments with a KV cache share: the widgets that make a scenario again; light imports."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import scenarios as kv_scenarios
from engram_lab.lab.ask import widgets

if TYPE_CHECKING:
    from engram_lab.lab.ask.view import View
    from engram_lab.probes.kv.scenario import Scenario

OWN = "own"  # id and kind of a scenario that is from no library
YOUR_OWN = "your own"  # its name in the picker, as lab.app.page.OWN
ALL = "all kinds"
PARTS = {"K and V": "kv", "K alone": "k", "V alone": "v"}
EDITED = ("template", "old", "new", "answer_old", "answer_new", "chat")  # fields with a widget in every experiment
SAID = ("erratum", "irrelevant", "wrong", "third")  # and those of the errata


def checksum(scenario: Scenario) -> str:
    """What ends the keys of the widgets that edit a scenario of a file, whose id may come again with other texts."""
    return f"{zlib.crc32(kv_scenarios.written([scenario]).encode()):08x}"


def edited(known: Scenario, edits: dict[str, Any]) -> Scenario:
    """A scenario with some fields as a user has them; one of a library gets an id of its own for it."""
    scenario = dataclasses.replace(known, **edits)
    if scenario != known and known.id != OWN:
        scenario = dataclasses.replace(scenario, id=f"{known.id}-edited", kind=OWN)
    return scenario


def view(experiment: str, config: Any, shown: dict[str, Any], fields: Sequence[str] = EDITED) -> View:
    """The page of an experiment with one scenario, of which `fields` can be edited."""
    scenario: Scenario = config.scenario
    edits = {name: getattr(scenario, name) for name in fields}
    ours = kv_scenarios.library()
    starts = {own.id: own for own in ours} | {YOUR_OWN: dataclasses.replace(ours[0], id=OWN, kind=OWN)}
    name = next((name for name, known in starts.items() if scenario in (known, edited(known, edits))), None)
    files = {}
    if name is not None:
        own = starts[name].id
    else:  # in a library of its own
        name, own, files = scenario.id, checksum(scenario), library([scenario])
        if name == YOUR_OWN:
            widgets.refuse(f'a scenario with the id "{YOUR_OWN}" from a file')
    shown = {
        **widgets.models(config.models),
        "experiment": experiment,
        "kind": ALL,
        "scenario": name,
        **{f"{field}.{own}": value for field, value in edits.items()},
        "split": config.align == "split",
        **shown,
    }
    return widgets.view("kv", shown, files)


def library(scenarios: Sequence[Scenario]) -> dict[str, widgets.File]:
    """Scenarios as the file that the page reads."""
    raw = kv_scenarios.written(scenarios).encode()
    if kv_scenarios.read(raw, kv_scenarios.FILE) != tuple(scenarios):
        widgets.refuse("a scenario that no file holds")
    return {"kv_file": (kv_scenarios.FILE, raw)}


def seed(config: Any) -> dict[str, int]:
    """The box of the seed."""
    return {"seed": widgets.within("a seed", config.seed, *widgets.SEEDS)}


def part(config: Any) -> dict[str, str]:
    """What is swapped."""
    return {"part": widgets.one_of("the part", config.part, PARTS)}
