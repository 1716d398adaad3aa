"""A lab whose Engram has two memory layers, and a second Engram beside its dense twin, for the pages about places."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.ask import scenarios as kv_scenarios
from engram_lab.lab.ask import texts
from engram_lab.lab.command import card
from engram_lab.models import listing
from engram_lab.models.engram import EngramForCausalLM
from engram_lab.probes.facts.sets import Expected, StatedFact
from engram_lab.probes.kv.scenario import Scenario
from tests.models import tiny

CONTEXT = 640  # tokens


def engram(tokenizer: PreTrainedTokenizerFast, seed: int) -> EngramForCausalLM:
    model = tiny.engram(tokenizer, seed, max_position_embeddings=CONTEXT, engram_layer_ids=[0, 2], engram_vocab_size=40)
    with torch.no_grad():
        for memory in model.model.memories():
            memory.table.weight.normal_()
    return model


def make(folder: Path, shipped: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """`folder`/models as the shipped models of this lab, `folder`/row_hits for their counts."""
    models = folder / "models"
    shutil.copytree(shipped, models)
    for seed, name in enumerate(("engram-mini", "engram-mini-early")):
        engram(tokenizer, seed).save_pretrained(models / name)
        tokenizer.save_pretrained(models / name)
        for extra in ("training.json", "card.json"):
            shutil.copy(shipped / "engram-mini" / extra, models / name / extra)
    (folder / "row_hits").mkdir()
    return models


PERSONA = (
    StatedFact(
        "The river runs past the old", " mill", ("Past the river is the",),
        (Expected("Paris is the capital of", " France"),), Expected("The old mill and the", " river"), "mill",
    ),
    StatedFact("Paris is the capital of", " Japan"),
    StatedFact("Tokyo is the", " sea"),
)  # fmt: skip
# What our texts become where an app is to draw a page in no time.
FEW = {"held_out.txt": 20, "facts.jsonl": 3, "reading.jsonl": 3, "prompts.json": None, "entities.bio": 60}


@contextmanager
def few_texts(folder: Path, scenarios: Sequence[Scenario]) -> Iterator[None]:
    """The app's own texts cut to a few lines, these scenarios, and a persona of three facts."""
    for name, lines in FEW.items():
        own = (texts.TEXTS / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / name).write_text("".join(own[:lines]), encoding="utf-8")
    (folder / "library.jsonl").write_text(kv_scenarios.written(scenarios), encoding="utf-8")
    (folder / "persona.jsonl").write_text(facts_files.written(PERSONA), encoding="utf-8")
    read_once = (texts.examples, texts.held_out, texts.shipped_sets, kv_scenarios.library, facts_files.persona)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "TEXTS", folder)
        patch.setattr(kv_scenarios, "LIBRARY", folder / "library.jsonl")
        patch.setattr(facts_files, "PERSONA", folder / "persona.jsonl")
        for read in read_once:
            read.cache_clear()
        yield
    for read in read_once:
        read.cache_clear()


@contextmanager
def served(models: Path) -> Iterator[pytest.MonkeyPatch]:
    """The app's shipped models are those of this folder."""
    with pytest.MonkeyPatch.context() as patch:
        serve(models, patch)
        yield patch


def serve(models: Path, patch: pytest.MonkeyPatch) -> None:
    """The same until the patch is undone; where a test patches as well, it has to be by the test's own patch."""
    patch.setattr(listing, "SHIPPED", models)
    patch.setattr(card, "MODELS", models)
