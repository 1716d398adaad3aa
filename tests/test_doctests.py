"""The examples in the docstrings of models/ and probes/ run, on tiny models, and print what they say.

An example finds these names: `handle`, a tiny Engram (3 layers, a memory at block 1), `dense`, a tiny Llama of the same
vocabulary, and `folder`, a fresh Path to write into.
"""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from engram_lab.lab.fronts import FRONTS
from engram_lab.models.handle import Handle
from tests.models import tiny

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    ".".join(("engram_lab", *file.relative_to(ROOT).with_suffix("").parts))
    for folder in ("models", "probes")
    for file in (ROOT / folder).rglob("*.py")
    if ">>>" in file.read_text(encoding="utf-8")
)
# What a reader starts from: each has an example of its own.
SHOWN = [
    "engram_lab.models.handle.Handle",
    "engram_lab.models.kv.KV",
    "engram_lab.models.memory.Edit",
    "engram_lab.models.overlay.Stack",
    *(f"engram_lab.probes.{probe.replace(' ', '.')}.run" for probe in FRONTS),
]


@pytest.fixture(scope="module")
def handles() -> dict[str, Handle]:
    tokenizer = tiny.byte_level()
    return {
        "handle": Handle(tiny.engram(tokenizer), tokenizer, "tiny-engram"),
        "dense": Handle(tiny.make("llama", vocab_size=len(tokenizer)), tokenizer, "tiny-dense"),
    }


@pytest.mark.parametrize("module", MODULES)
def test_examples_print_what_they_say(module: str, handles: dict[str, Handle], tmp_path: Path) -> None:
    names = {**handles, "folder": tmp_path}
    # Each example has a namespace of its own, so that none rests on another.
    result = doctest.testmod(
        importlib.import_module(module),
        extraglobs=names,
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert result.attempted and not result.failed


@pytest.mark.parametrize("shown", SHOWN)
def test_what_a_reader_starts_from_has_an_example(shown: str) -> None:
    module, _, name = shown.rpartition(".")
    assert ">>>" in (getattr(importlib.import_module(module), name).__doc__ or ""), shown
