"""A pool opens each model once, closes the least recently used, and tells a model's own error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from engram_lab.models import handle as handle_module
from engram_lab.models.errors import CheckpointError, UnknownModelError
from engram_lab.models.handle import Handle
from engram_lab.models.pool import ModelKey, Pool
from tests.models import tiny

A, B, C = (ModelKey(name) for name in "abc")


@pytest.fixture
def opened(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was opened, in order; it is always the same tiny model."""
    names: list[str] = []

    def read(name: str, *, device: str | None, dtype: str | None, trust_remote_code: bool) -> Handle:
        if name == "missing":
            raise UnknownModelError("There is no model missing.")
        names.append(name)
        return Handle(tiny.make("llama"), tokenizer, name)

    monkeypatch.setattr(handle_module, "open_model", read)
    return names


def test_a_model_is_opened_once_and_closed_at_the_end(opened: list[str]) -> None:
    with Pool() as pool:
        first, second, again = pool.get([A, B, A])
        assert again is first is not second and pool.get([B]) == [second]
    assert opened == ["a", "b"]
    assert not first.is_open and not second.is_open


def test_how_it_is_opened_is_part_of_what_it_is(opened: list[str]) -> None:
    with Pool() as pool:
        plain, half = pool.get([A, replace(A, dtype="bfloat16")])
        assert plain is not half and opened == ["a", "a"]


def test_the_least_recently_used_is_closed_before_the_next_is_read(opened: list[str]) -> None:
    with Pool(most=2) as pool:
        a, b = pool.get([A, B])
        pool.get([A])
        pool.get([C])
        assert a.is_open and not b.is_open
        three = pool.get([A, B, C])
        assert all(handle.is_open for handle in three)  # more than `most`, as they are needed at once


def test_what_is_needed_sooner_stays(opened: list[str]) -> None:
    with Pool(most=2) as pool:
        a, b = pool.get([A, B])
        pool.get([C], later=[A, B])
        assert a.is_open and not b.is_open
        pool.keep([C])
        assert not a.is_open


def test_a_model_that_cannot_be_opened_is_tried_once_more_without_the_others(
    opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    works, tries = handle_module.open_model, []
    with Pool() as pool:
        (a,) = pool.get([A])

        def full(name: str, **options: object) -> Handle:
            tries.append(a.is_open)
            if a.is_open:
                raise CheckpointError("There is no memory left.")
            return works(name, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(handle_module, "open_model", full)
        assert pool.get([B])[0].is_open and tries == [True, False]


def test_an_error_is_told_again_without_another_try(opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool() as pool:
        with pytest.raises(UnknownModelError, match="no model missing"):
            pool.get([A, ModelKey("missing")])
        monkeypatch.setattr(handle_module, "open_model", None)
        with pytest.raises(UnknownModelError, match="no model missing"):
            pool.get([ModelKey("missing")])
