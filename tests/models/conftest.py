"""One tiny tokenizer, and a checkpoint folder that a test may spoil."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.models import tiny


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.byte_level()


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A complete folder of a tiny Llama."""
    folder = tmp_path / "checkpoint"
    tiny.make("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
