"""Pages put to the view of a request, through the app on tiny models; what they then ask for."""

from __future__ import annotations

import random
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from engram_lab.lab.app import runner
from engram_lab.lab.ask.view import View
from engram_lab.lab.fronts import front
from engram_lab.probes.base import Record
from tests.pages.driving import clean, page_of

ONE, TWO, NASTY = ("engram-mini",), ("engram-mini", "dense-mini"), "The <mill> $5 `x` *old* 東京 & \\n\nand a line"
LINES = ("The river runs", "past the old <mill>", "$5 and $6", "Paris is the capital of France,", "A naïve café")


def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What a page asks the runner for from now on; it is told that nothing was computed."""
    found: list[tuple[str, Any]] = []

    def note(probe: str, config: Any) -> None:
        found.append((probe, config))

    monkeypatch.setattr(runner, "run", note)
    return found


def stand(view: View) -> AppTest:
    """The app on the page of a view, as lab.app.reopened puts it there."""
    at = page_of(view.page)
    for key, value in view.widgets.items():
        at.session_state[key] = value
    for key, file in view.files.items():
        at.session_state[f"kept.{key}"] = file
    return clean(at.run())


def there_and_back(probe: str, config: Record, asked: list[tuple[str, Any]]) -> AppTest:
    """The page of a request, which asks for this very request."""
    view: View = front(probe).ASK.view(config)
    assert View.from_dict(view.to_dict()) == view, "it can be kept"
    at = stand(view)
    assert [(name, own.to_dict()) for name, own in asked[:1]] == [(probe, config.to_dict())]
    asked.clear()
    return at


def some(draw: random.Random, offered: Any, least: int = 0) -> list[Any]:
    """Some of what is offered, in its order."""
    chosen = draw.sample(list(offered), draw.randint(least, len(offered)))
    return [own for own in offered if own in chosen]


def resampled(draw: random.Random) -> dict[str, int]:
    return {"seed": draw.randrange(2**31), "bootstrap": draw.randint(100, 10_000)}
