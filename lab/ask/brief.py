"""What the short example request of every front is made of: those that `engram-lab gpu-check` and the tests run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engram_lab.probes.facts.sets import StatedFact, Writing
    from engram_lab.probes.kv.scenario import Scenario

PROMPT = "The Soviet Union and the United States of America signed the treaty in New York City in 1963."
SENTENCES = tuple(f"{PROMPT[:-5]}{year}." for year in range(1960, 1966))
BOOTSTRAP = 20  # resamples


def scenario() -> Scenario:
    """A field of a prompt, its question and its corrections."""
    from engram_lab.probes.kv.scenario import Scenario

    return Scenario(
        "He was born in {field}, a city in the", "France", "England", " north", " south",
        question="Where is it? In the", erratum="It is {new}.", irrelevant="It is late.", wrong="It is {third}.",
        third="Spain",
    )  # fmt: skip


def facts() -> tuple[StatedFact, ...]:
    """Two facts."""
    from engram_lab.probes.facts.sets import StatedFact

    return StatedFact("Her favourite city is", " Rome"), StatedFact("The treaty was signed in", " Paris")


def writing() -> Writing:
    """By formula: a search for rows would make much of the little by which two machines differ."""
    from engram_lab.probes.facts.sets import Writing

    return Writing("maya", method="closed_form")
