"""The parts that several probes share: models, prompts, text sets, resampling, scenarios and facts."""

from __future__ import annotations

import argparse
import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.ask import flags as arguments
from engram_lab.lab.ask import scenarios
from engram_lab.lab.ask.request import Choice, File, Number, Part, Switch, Text, flag, refuse
from engram_lab.lab.ask.texts import ONE, SET, file_of, held_out

if TYPE_CHECKING:
    from engram_lab.probes.kv.scenario import Scenario as ScenarioText

NOTHING = "nothing"  # the sidebar's choice of no second model
OWN = "own"  # id and kind of a scenario that is from no library
YOUR_OWN = "your own"  # its name in the picker, and that of a prompt of one's own
ALL_KINDS = "all kinds"
PARTS = {"K and V": "kv", "K alone": "k", "V alone": "v"}  # of a cache, in the words of the page
EDITED = ("template", "old", "new", "answer_old", "answer_new", "chat")  # fields with a widget in every experiment
ERRATA = ("erratum", "irrelevant", "wrong", "third")  # and those of the errata

SEED = Number(
    "seed", "seed of all that is drawn (default %(default)s)", 0, "seed", "a seed", low=0, label="Seed",
    tip="Of all that is drawn.",
)  # fmt: skip
BOOTSTRAP = Number(
    "bootstrap", "resamples for the intervals (default %(default)s)", 1000, "bootstrap", "a number of resamples",
    low=100, high=10_000, step=100, label="Resamples", tip="Of the texts, with replacement, for the 95 % intervals.",
)  # fmt: skip
RESAMPLING = (SEED, BOOTSTRAP)
SECONDS = Switch("time", "measure seconds too", key="kv_time", label="Measure seconds")
METHOD = Choice(
    "method", "", "optimised", "facts_method", "the method", label="Method",
    words={"optimised": "optimised", "closed form": "closed_form"}, tip="By formula, or trained from that start.",
)  # fmt: skip
STEPS = Number(  # more than the page offers may be asked for elsewhere
    "steps", "", 15, "facts_steps", "a number of steps", low=0, high=200, label="Steps",
    tip="Of Adam, for the optimised method.",
)  # fmt: skip
UNRELATED_TEXTS = Number(
    "texts", "", facts_files.N_TEXTS, "facts_texts", low=0, label="Unrelated texts",
    tip="Sentences that have nothing to do with the facts, compared before and after.",
)  # fmt: skip
SWAPPED = Choice("part", "what to swap (default %(default)s)", "kv", "part", "the part", words=PARTS, label="Swapped")


@dataclass(frozen=True)
class Models(Part):
    """The model of the sidebar, or two."""

    field: str = "models"
    against: Literal["no", "optional", "required"] = "no"

    def add(self, parser: argparse.ArgumentParser) -> None:
        """--model, --against if the probe compares, and how models are opened."""
        arguments.add_models(parser, self.against)

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """Their names."""
        return {"models": arguments.names(args)}

    def flags(self, config: Any) -> list[str]:
        """--model and --against."""
        return arguments.model_flags(config.models)

    def view(self, config: Any) -> dict[str, Any]:
        """The sidebar."""
        names = config.models
        if len(names) == 2 and names[0] == names[1]:
            refuse("a model beside itself")
        return {"model": names[0], "against": names[1] if len(names) == 2 else NOTHING}


def file_of_texts(texts: Sequence[str], ours: Sequence[str]) -> dict[str, File]:
    """What the page reads texts from: nothing for the first so many of ours, else a file with one a line."""
    if tuple(texts) == tuple(ours[: len(texts)]) and texts:
        return {}
    if not texts:
        refuse("no text at all")
    name, content = file_of(texts)
    return {"file": (name, content.encode())}


@dataclass(frozen=True)
class Prompts(Part):
    """One prompt, told position by position (`detail`), or a text set, told in means."""

    uploads = ("file",)
    field: str = "prompts"

    def add(self, parser: argparse.ArgumentParser) -> None:
        """--prompt or --prompts."""
        arguments.add_prompts(parser)

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The texts, and whether they are told one by one."""
        prompts, detail = arguments.read_prompts(args)
        return {"prompts": prompts, "detail": detail}

    def flags(self, config: Any) -> list[str]:
        """--prompt for each, or --prompts."""
        return arguments.prompt_flags(config.prompts, config.detail)

    def files(self, config: Any) -> dict[str, str]:
        """The text set."""
        return arguments.texts_file(config.prompts, config.detail)

    def view(self, config: Any) -> dict[str, Any]:
        """The mode, and the prompt or the number of texts."""
        if not config.detail:
            return {"mode": SET, "texts": len(config.prompts)}
        if len(config.prompts) != 1:
            refuse(f"{len(config.prompts)} prompts told one by one")
        return {"mode": ONE, "prompt": config.prompts[0]}

    def brought(self, config: Any) -> dict[str, File]:
        """The text set, unless it is the first of ours."""
        return {} if config.detail else file_of_texts(config.prompts, held_out())


class Prompt(Text):
    """One prompt, alone in the request's `prompts`."""

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The prompt as the only one."""
        return {"prompts": (args.prompt,)}

    def flags(self, config: Any) -> list[str]:
        """--prompt."""
        return [flag("prompt", config.prompts[0])]

    def view(self, config: Any) -> dict[str, Any]:
        """The box."""
        return {"prompt": config.prompts[0]}


@dataclass(frozen=True)
class Unasked(Part):
    """A part whose widget, if there is one, stays as it is when a request is opened on its page."""

    _: dataclasses.KW_ONLY
    part: Part

    def add(self, parser: argparse.ArgumentParser) -> None:
        """As the part."""
        self.part.add(parser)

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """As the part."""
        return self.part.read(args)

    def flags(self, config: Any) -> list[str]:
        """As the part."""
        return self.part.flags(config)

    def view(self, config: Any) -> dict[str, Any]:
        """Nothing."""
        return {}


@dataclass(frozen=True)
class InMode(Unasked):
    """A part that the page asks for in one of the two modes of Prompts alone."""

    _: dataclasses.KW_ONLY
    detail: bool
    always: bool = True  # its flag is written in the other mode too

    def flags(self, config: Any) -> list[str]:
        """As the part."""
        return super().flags(config) if self.always or config.detail == self.detail else []

    def view(self, config: Any) -> dict[str, Any]:
        """As the part; in the other mode it has to be as by default."""
        here = config.detail == self.detail
        return (self.part if here else Part(self.part.field, default=self.part.default)).view(config)


def of_one_prompt(part: Part, always: bool = True) -> InMode:
    """What the page asks for of one prompt alone."""
    return InMode(part.field, part=part, detail=True, always=always)


def of_a_set(part: Part) -> InMode:
    """What the page asks for of a text set alone."""
    return InMode(part.field, part=part, detail=False)


def unasked(part: Part) -> Unasked:
    """The part, without its widget."""
    return Unasked(part.field, part=part)


RESAMPLED = tuple(map(unasked, RESAMPLING))


# --- The experiments with a KV cache -------------------------------------------------------------------------------


def checksum(scenario: ScenarioText) -> str:
    """What ends the keys of the widgets that edit a scenario of a file, whose id may come again with other texts."""
    return f"{zlib.crc32(scenarios.written([scenario]).encode()):08x}"


def edited(known: ScenarioText, edits: dict[str, Any]) -> ScenarioText:
    """A scenario with some fields as a user has them; one of a library gets an id of its own for it."""
    scenario = dataclasses.replace(known, **edits)
    if scenario != known and known.id != OWN:
        scenario = dataclasses.replace(scenario, id=f"{known.id}-edited", kind=OWN)
    return scenario


def file_of_scenarios(given: Sequence[ScenarioText]) -> dict[str, File]:
    """Scenarios as the file that the page reads."""
    raw = scenarios.written(given).encode()
    if scenarios.read(raw, scenarios.FILE) != tuple(given):
        refuse("a scenario that no file holds")
    return {"kv_file": (scenarios.FILE, raw)}


@dataclass(frozen=True)
class Experiment(Part):
    """Which of the page's experiments it is."""

    def view(self, config: Any) -> dict[str, Any]:
        """Its name."""
        return {"experiment": self.field}


@dataclass(frozen=True)
class Scenario(Part):
    """One scenario with --align, and the experiment of the page that it opens, of which `fields` can be edited."""

    uploads = ("kv_file",)
    field: str = "scenario"
    experiment: str = ""
    fields: tuple[str, ...] = EDITED

    def add(self, parser: argparse.ArgumentParser) -> None:
        """--scenario or its fields, and --align."""
        scenarios.add_scenario(parser)

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The scenario and how values of different length are aligned."""
        return {"scenario": scenarios.scenario_of(args), "align": args.align}

    def flags(self, config: Any) -> list[str]:
        """The id of one that ships, or every field."""
        return scenarios.scenario_flags(config.scenario, config.align)

    def _start(self, scenario: ScenarioText) -> tuple[str, str] | None:
        """(name, id) of what it is picked from; None for one from a file."""
        ours = scenarios.library()
        edits = {name: getattr(scenario, name) for name in self.fields}
        starts = {known.id: known for known in ours} | {YOUR_OWN: dataclasses.replace(ours[0], id=OWN, kind=OWN)}
        names = (name for name, known in starts.items() if scenario in (known, edited(known, edits)))
        name = next(names, None)
        return None if name is None else (name, starts[name].id)

    def view(self, config: Any) -> dict[str, Any]:
        """The experiment, the scenario that is picked, and its fields."""
        scenario = config.scenario
        name, end = self._start(scenario) or (scenario.id, checksum(scenario))
        return {
            "experiment": self.experiment,
            "kind": ALL_KINDS,
            "scenario": name,
            **{f"{field}.{end}": getattr(scenario, field) for field in self.fields},
            "split": config.align == "split",
        }

    def brought(self, config: Any) -> dict[str, File]:
        """A library of the one scenario, unless it can be made of what ships."""
        scenario = config.scenario
        if self._start(scenario):
            return {}
        files = file_of_scenarios([scenario])
        if scenario.id == YOUR_OWN:
            refuse(f'a scenario with the id "{YOUR_OWN}" from a file')
        return files


# --- The probes of facts -------------------------------------------------------------------------------------------


def with_layer(report: Any) -> Any:
    """The request of a report about facts with the layer that was written at."""
    config = report.config
    return dataclasses.replace(config, writing=dataclasses.replace(config.writing, layer=report.result.layer))


@dataclass(frozen=True)
class Facts(Part):
    """The facts, whose they are, and how they are written; one of the views of the page by name.

    The page asks for the facts that lab.app.fact_users.restore puts back. So a view need not make all of a request: of
    a setting that the page does not offer, its widget stays as it is, and the page says that it differs.
    """

    field: str = "facts"
    view_name: str = ""
    layer: bool = True  # whether one layer is asked for here
    overlay: bool = False  # whether an overlay may bring them

    def add(self, parser: argparse.ArgumentParser) -> None:
        """--facts or --fact, and how they are written."""
        facts_files.add_facts(parser, layer=self.layer)
        if self.overlay:
            parser.add_argument(
                "--overlay", type=Path, metavar="FILE", help="an overlay, to take facts, user, method and layer from"
            )

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The facts and the writing."""
        if self.overlay and args.overlay is not None:
            facts, args = facts_files.of_overlay(args)
        else:
            facts = facts_files.facts_of(args)
        return {"facts": facts, "writing": facts_files.writing_of(args)}

    def flags(self, config: Any) -> list[str]:
        """Those of both."""
        return facts_files.flags(config.facts, config.writing)

    def files(self, config: Any) -> dict[str, str]:
        """The facts, where they are not ours."""
        return facts_files.files(config.facts)

    def view(self, config: Any) -> dict[str, Any]:
        """The view, the user and the writing, as far as the page offers it."""
        writing = config.writing
        shown = {
            "facts_view": self.view_name,
            "facts_user": writing.user,
            str(METHOD.key): METHOD.shown(writing.method),
        }
        if writing.steps <= STEPS.high:
            shown[str(STEPS.key)] = writing.steps
        if writing.layer is not None:
            shown["facts_layer"] = writing.layer
        return shown


@dataclass(frozen=True)
class Unrelated(Part):
    """Texts about other things: --texts and --n-texts; the widget counts those of ours."""

    n_texts: int = facts_files.N_TEXTS

    def add(self, parser: argparse.ArgumentParser) -> None:
        """--texts and --n-texts."""
        facts_files.add_texts(parser)
        parser.set_defaults(n_texts=self.n_texts)

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The texts."""
        return {self.field: facts_files.texts_of(args)}

    def flags(self, config: Any) -> list[str]:
        """How many, and of which file."""
        return facts_files.text_flags(getattr(config, self.field))

    def files(self, config: Any) -> dict[str, str]:
        """The texts, where they are not ours."""
        return facts_files.files(facts_files.persona(), getattr(config, self.field))

    def view(self, config: Any) -> dict[str, Any]:
        """How many of our sentences they are, if they are such."""
        texts = getattr(config, self.field)
        return {str(self.key): len(texts)} if texts == held_out()[: len(texts)] else {}
