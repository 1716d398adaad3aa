"""From a request to the widgets and files of its page and, through the app, back to the request, for every probe."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engram_lab.lab.ask import scenarios as kv_scenarios
from engram_lab.lab.ask import texts
from engram_lab.lab.fronts import cka as cka_front
from engram_lab.lab.fronts import front, settled
from engram_lab.lab.fronts.kv_compose import AGAIN, LENGTHS
from engram_lab.lab.fronts.kv_erratum import POLICIES
from engram_lab.lab.fronts.kv_reasoning import TOKENS
from engram_lab.lab.fronts.kv_swap import SIZES
from engram_lab.lab.fronts.rows import our_sentences
from engram_lab.models.errors import LabError
from engram_lab.models.handle import open_model
from engram_lab.probes import gates, rows, tuned_lens
from engram_lab.probes.base import Record
from engram_lab.probes.cka import CKAConfig
from engram_lab.probes.gates import GatesConfig
from engram_lab.probes.kv.compose import ComposeConfig
from engram_lab.probes.kv.erratum import ErratumConfig
from engram_lab.probes.kv.knockout import TARGETS, KnockoutConfig
from engram_lab.probes.kv.map import MapConfig
from engram_lab.probes.kv.reasoning import ReasoningConfig
from engram_lab.probes.kv.scenario import ALIGN, Scenario
from engram_lab.probes.kv.set import SetConfig
from engram_lab.probes.kv.swap import SwapConfig
from engram_lab.probes.lens import LensConfig
from engram_lab.probes.points import take
from engram_lab.probes.rows import RowsConfig
from engram_lab.probes.sensitivity import Item, SensitivityConfig, TextSet
from tests.pages.viewing import LINES, NASTY, ONE, TWO, noted, resampled, some, stand, there_and_back
from tests.probes.kv.tiny import RIVER
from tests.probes.test_tuned_lens import translators

pytestmark = pytest.mark.usefixtures("lab_with_memories")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What the page asks for."""
    return noted(monkeypatch)


# --- Configs that pages can make -------------------------------------------------------------------------------------


def lens(draw: random.Random) -> Iterator[Record]:
    yield LensConfig(TWO, (texts.examples()[0]["prompt"],))
    yield LensConfig(("dense-mini",), (NASTY,), " the", 20)
    yield LensConfig(TWO, texts.held_out()[:3], detail=False, **resampled(draw))
    yield LensConfig(ONE, LINES, detail=False)


def gated(draw: random.Random) -> Iterator[Record]:
    yield GatesConfig(ONE, (texts.examples()[0]["prompt"],))
    yield GatesConfig(ONE, (NASTY,), " the", 3, ("shuffled@2",), True, 77)
    yield GatesConfig(("engram-mini-early",), (NASTY,), controls=("off",))
    yield GatesConfig(ONE, texts.held_out(), detail=False)
    controls = draw.sample([name + at for name in ("off", "one_row", "shuffled") for at in ("", "@0", "@2")], 5)
    yield GatesConfig(ONE, LINES, controls=tuple(controls), min_count=2, detail=False, **resampled(draw))


def row(draw: random.Random) -> Iterator[Record]:
    yield RowsConfig(ONE, (texts.examples()[0]["prompt"],), 2, 0, our_sentences())
    yield RowsConfig(("engram-mini-early",), (NASTY,), 5, 2, LINES, draw.randint(1, 50), draw.randint(0, 500))


def needs(draw: random.Random) -> Iterator[Record]:
    facts, reading, sentences = texts.shipped_sets()
    yield SensitivityConfig(TWO, (facts, reading, sentences))
    controls = ("shuffled", "shuffled@0", "shuffled@2", "off", "off@0", "off@2")
    yield SensitivityConfig(ONE, (reading, facts, sentences), controls, **resampled(draw))
    own = TextSet("my own. facts", (Item("Paris is the", " capital"), Item('"a" \\', " b")))
    yield SensitivityConfig(TWO, (TextSet("mine", tuple(map(Item, LINES))), own), ("one_row@2", "zeroed@2"))


def alike(draw: random.Random) -> Iterator[Record]:
    prompts, entities = take(cka_front.shipped(), "entity", 200)
    yield CKAConfig(TWO, prompts, entities)
    prompts, entities = take(cka_front.shipped(), "entity", 7)
    yield CKAConfig(("dense-mini", "dense-mini"), prompts[2:], (entities or ())[2:], **resampled(draw))
    yield CKAConfig(TWO, (NASTY, "  b "), points="all")
    yield CKAConfig(TWO, LINES, None, "last", ("Eins", "zwei\n", "drei", "vier", NASTY))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scenario, ...]]:
    """Two scenarios in place of those that ship."""
    look = dataclasses.replace(
        RIVER, id="look", kind="lookup", question="q", third="sea", erratum="It is the {new}.",
        irrelevant="The mill is old.", wrong="It is the {third}.",
    )  # fmt: skip
    rule = dataclasses.replace(look, id="rule", kind="rule", old=look.new, new=look.old, erratum="No, {new}.")
    file = tmp_path_factory.mktemp("kv") / "library.jsonl"
    file.write_text(kv_scenarios.written((look, rule)), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_scenarios, "LIBRARY", file)
        kv_scenarios.library.cache_clear()
        yield kv_scenarios.library()
    kv_scenarios.library.cache_clear()


def scenarios() -> Iterator[Scenario]:
    """One that ships, one edited, a user's own from ours, one typed on the command line, one of a file."""
    look, rule = kv_scenarios.library()
    yield rule
    yield dataclasses.replace(look, new="sea", chat=True, id="look-edited", kind="own")
    yield dataclasses.replace(look, template="Tokyo {field} the", old="is", new="and", id="own", kind="own")
    yield Scenario(f"{NASTY} {{field}} is the", "mill", "sea", " old", " Japan", erratum="It is the {new}.")
    yield dataclasses.replace(rule, distractors="none", answer_new="river")


def swap(draw: random.Random) -> Iterator[Record]:
    for scenario in list(scenarios())[::2]:
        k = tuple(some(draw, SIZES.offered))
        layers = tuple(some(draw, range(3))) or None
        fields = {"last": k, "best": k, "random": k, "draws": draw.randint(1, 100), "seed": draw.randrange(2**31)}
        yield SwapConfig(ONE, scenario, draw.choice(("kv", "k", "v")), layers, align="split", **fields)
    yield SwapConfig(("dense-mini",), kv_scenarios.library()[0])


def mapped(draw: random.Random) -> Iterator[Record]:
    for groups, scenario in zip((0, 3), list(scenarios())[1::3], strict=True):
        yield MapConfig(ONE, scenario, groups, draw.choice(("kv", "k", "v")), draw.choice(ALIGN))


def knocked(draw: random.Random) -> Iterator[Record]:
    look, rule = kv_scenarios.library()
    yield KnockoutConfig(ONE, look)
    targets = (*some(draw, TARGETS[:3]), "positions")
    yield KnockoutConfig(ONE, rule, targets, ("zero", "unrelated"), (0, 3), NASTY, 50, "split", 9)
    yield KnockoutConfig(ONE, rule, ("notes",), ("mean",), draws=1)


def corrected(draw: random.Random) -> Iterator[Record]:
    for scenario in scenarios():
        yield ErratumConfig(ONE, scenario, align="split", thresholds=tuple(some(draw, POLICIES.offered, 1)))
    worded = dataclasses.replace(
        kv_scenarios.library()[0], erratum="Now {new}!", third="Paris", wrong="w", id="look-edited", kind="own"
    )  # fmt: skip
    chain = (("a=b", "c"), ("sea", "Japan"))
    yield ErratumConfig(("dense-mini",), worded, chain, 20, "Say {value}, not {before}.", (4,), "refuse", True)


def written(draw: random.Random) -> Iterator[Record]:
    for scenario in list(scenarios())[::3]:
        yield ReasoningConfig(ONE, scenario, tuple(some(draw, TOKENS.offered, 1)), draw.choice(("", NASTY)), "split")
    yield ReasoningConfig(ONE, kv_scenarios.library()[0])


def composed(draw: random.Random) -> Iterator[Record]:
    yield ComposeConfig(ONE)
    again, lengths = tuple(some(draw, AGAIN.offered)), tuple(some(draw, LENGTHS.offered[:4]))
    yield ComposeConfig(("dense-mini",), "", NASTY, "b", (), again, lengths, True)
    yield ComposeConfig(ONE, NASTY, "b", "c", (" a", "b"), (), (), False)


def whole(draw: random.Random) -> Iterator[Record]:
    ours = kv_scenarios.library()
    yield SetConfig(ONE, ours)
    yield SetConfig(ONE, tuple(dataclasses.replace(own, chat=True) for own in ours), "split", **resampled(draw))
    yield SetConfig(ONE, (ours[1], dataclasses.replace(ours[0], chat=True, old="sea")))


CASES: dict[str, Callable[[random.Random], Iterator[Record]]] = {
    "lens": lens,
    "gates": gated,
    "rows": row,
    "sensitivity": needs,
    "cka": alike,
    "kv swap": swap,
    "kv map": mapped,
    "kv knockout": knocked,
    "kv erratum": corrected,
    "kv reasoning": written,
    "kv compose": composed,
    "kv set": whole,
}


@pytest.mark.parametrize("probe", CASES)
def test_a_page_asks_for_the_request_that_its_view_is_of(
    probe: str, library: tuple[Scenario, ...], asked: list[tuple[str, Any]]
) -> None:
    for config in CASES[probe](random.Random(probe)):
        there_and_back(probe, config, asked)


REFUSED: list[tuple[str, Record, str]] = [
    ("lens", LensConfig(ONE, LINES), "5 prompts told one by one"),
    ("lens", LensConfig(ONE, LINES[:1], seed=3), "seed 3"),
    ("lens", LensConfig(ONE, LINES[:1], top_k=21), "a number of top tokens of 21, only for 1 to 20"),
    ("lens", LensConfig(("a", "a"), LINES[:1]), "a model beside itself"),
    ("lens", LensConfig(ONE, LINES, detail=False, bootstrap=9), "a number of resamples of 9"),
    ("gates", GatesConfig(ONE, LINES[:1], knock_out=True), "a position from the end"),
    ("gates", GatesConfig(ONE, LINES[:1], controls=("off", "zeroed")), "several controls at once"),
    ("gates", GatesConfig(ONE, LINES[:1], seed=1), "seed 1"),
    ("rows", RowsConfig(ONE, LINES[:1], 0, 2), "no text at all"),
    ("rows", RowsConfig(ONE, LINES[:1], -1, 2, LINES), "a position from the end"),
    ("rows", RowsConfig(ONE, LINES[:1], 0, 2, LINES, counts="c.safetensors"), "counts 'c.safetensors'"),
    (
        "sensitivity", SensitivityConfig(ONE, texts.shipped_sets(), ("off", "zeroed@2")),
        "the controls off, zeroed@2 together",
    ),
    ("cka", CKAConfig(TWO, ("a", "b"), ((), ((0, 1),))), "a sentence without an entity"),
]  # fmt: skip


@pytest.mark.parametrize(("probe", "config", "says"), REFUSED, ids=[f"{p}-{s}" for p, _, s in REFUSED])
def test_what_no_page_makes_is_refused_in_one_sentence(probe: str, config: Record, says: str) -> None:
    with pytest.raises(LabError) as error:
        front(probe).ASK.view(config)
    said = str(error.value)
    assert (
        said.startswith("Its page has no setting for ") and says in said and said.count(". ") == 0 and said[-1] == "."
    )


def test_what_a_request_leaves_to_the_model_is_as_its_report_found_it(asked: list[tuple[str, Any]]) -> None:
    """The last position and the first layer, as the command line leaves them open."""
    handle = open_model("engram-mini")
    last = len(handle.encode(NASTY)) - 1
    report = rows.run([handle], RowsConfig(ONE, (NASTY,), text=LINES))
    config = settled(report)
    assert (config.position, config.layer) == (last, 0)
    assert rows.run([handle], config).result == report.result, "the same request"
    there_and_back("rows", config, asked)
    shut = gates.run([handle], GatesConfig(ONE, (NASTY,), knock_out=True))
    assert settled(shut).position == last and gates.run([handle], settled(shut)).result == shut.result
    there_and_back("gates", settled(shut), asked)
    plain = gates.run([handle], GatesConfig(ONE, (NASTY,)))
    assert settled(plain) == plain.config


def test_the_tuned_lens_is_on_or_off_as_it_was(
    asked: list[tuple[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are translators, with which the page opens with it on."""
    monkeypatch.setenv("ENGRAM_LAB_CACHE", str(tmp_path))
    handle = open_model("dense-mini")
    tuned_lens.save(translators(handle, 0.2, 0), tuned_lens.places(handle)[0])
    for tuned in (False, True):
        there_and_back("lens", LensConfig(("dense-mini",), (NASTY,), tuned=tuned), asked)


def test_the_page_shows_what_was_kept() -> None:
    """With the runner itself: the result on the page is that of the request."""
    config = LensConfig(TWO, (NASTY,), " the", 3)
    at = stand(front("lens").ASK.view(config))
    from engram_lab.lab.fronts.export import command_line

    assert at.code[0].value == command_line("lens", config)
