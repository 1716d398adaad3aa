"""A lab whose Engram has two memory layers, and a second Engram beside its dense twin, for the pages about places."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from streamlit.testing.v1 import AppTest
from transformers import PreTrainedTokenizerFast

from lab import runner
from models.engram import EngramForCausalLM
from tests.lab.conftest import CONTEXT
from tests.models import tiny

APP = Path(runner.__file__).with_name("app.py")
PAGES = APP.parent.parent / "pages"


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


def open_page(name: str) -> AppTest:
    return AppTest.from_file(str(APP), default_timeout=200).run().switch_page(str(PAGES / f"{name}.py")).run()


def clean(at: AppTest) -> AppTest:
    assert not at.exception, at.exception
    assert not at.error, at.error[0].value
    return at


def change(at: AppTest, kind: str, key: str, value: Any) -> AppTest:
    if kind == "button_group":
        at.get_by_key(key).set_value(value)
    else:
        getattr(at, kind)(key=key).set_value(value)
    return at.run()


def table(at: AppTest, column: str) -> pd.DataFrame:
    """The first table of the page that has this column."""
    found: pd.DataFrame = next(t.value for t in at.dataframe if column in t.value.columns)
    return found


def sentence(at: AppTest) -> str:
    """The one error on the page."""
    assert not at.exception, at.exception
    assert len(at.error) == 1
    text = at.error[0].value.replace("\\", "")
    assert text.endswith(".") and "\n" not in text and "Traceback" not in text
    return str(text)
