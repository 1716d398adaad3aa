"""What the fronts' `view` share: a request as the values of its page's widgets, or why its page cannot make it.

The keys are those of lab/app/entry.py, lab/app/page.py and pages/*.py: tests/lab/ask/test_views.py goes there and back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from engram_lab.lab.ask import flags
from engram_lab.lab.ask.texts import ONE, SET, lines_of

if TYPE_CHECKING:
    from engram_lab.lab.ask.view import View

NOTHING = "nothing"  # the sidebar's choice of no second model, as lab.app.runner.NOTHING
SEEDS, RESAMPLES = (0, 2**31 - 1), (100, 10_000)  # what page.resampling takes
File = tuple[str, bytes]


def refuse(what: str) -> NoReturn:
    """LabError for a request that no setting of its page makes."""
    from engram_lab.models.errors import LabError

    raise LabError(
        f"Its page has no setting for {what}: this run can be shown and run again, but not opened on its page."
    )


def view(page: str, widgets: Mapping[str, Any], files: Mapping[str, File] | None = None) -> View:
    """A view whose files an uploader takes, and whose texts and lists are of the sizes that lab.ask.view allows."""
    from engram_lab.lab.ask.view import LARGEST_FILE, View, is_plain

    files = dict(files or {})
    if any(len(raw) > LARGEST_FILE for _, raw in files.values()):
        refuse(f"texts of more than {LARGEST_FILE >> 20} MB")
    if not all(map(is_plain, widgets.values())):
        refuse("a text or a list that is so long")
    return View(page, dict(widgets), files)


def models(names: Sequence[str]) -> dict[str, Any]:
    """The sidebar for one model, or two."""
    if len(names) == 2 and names[0] == names[1]:
        refuse("a model beside itself")
    return {"model": names[0], "against": names[1] if len(names) == 2 else NOTHING}


def within(what: str, value: int, low: int, high: int) -> int:
    """A value that a number box from low to high takes."""
    if not low <= value <= high:
        refuse(f"{what} of {value}, only for {low} to {high}")
    return value


def resampling(config: Any) -> dict[str, Any]:
    """The boxes of page.resampling."""
    return {
        "seed": within("a seed", config.seed, *SEEDS),
        "bootstrap": within("a number of resamples", config.bootstrap, *RESAMPLES),
    }


def without(config: Any, **defaults: Any) -> None:
    """LabError unless these fields, for which the page has no widget, are as it leaves them."""
    for name, value in defaults.items():
        if getattr(config, name) != value:
            words = f"{name.replace('_', ' ')} {getattr(config, name)!r}"
            refuse(words if len(words) <= 80 else f"{words[:79]}…")


def one_of(what: str, value: Any, words: Mapping[str, Any]) -> str:
    """The word that stands for a value on the page."""
    found = next((word for word, known in words.items() if known == value), None)
    if found is None:
        refuse(f"{what} {value!r}")
    return found


def some_of(what: str, values: Sequence[Any], offered: Collection[Any]) -> list[Any]:
    """Values of a choice of several whose request has them in the order in which they are offered."""
    if list(values) != [value for value in offered if value in values]:
        refuse(f"the {what} {', '.join(map(str, values))} in this order: it offers {', '.join(map(str, offered))}")
    return list(values)


def one_prompt(config: Any) -> dict[str, Any]:
    """The mode of one prompt."""
    if len(config.prompts) != 1:
        refuse(f"{len(config.prompts)} prompts told one by one")
    return {"mode": ONE, "prompt": config.prompts[0]}


def text_set(texts: Sequence[str], ours: Sequence[str]) -> tuple[dict[str, Any], dict[str, File]]:
    """(widgets, files) of page.text_set: the first so many of ours, or a file of texts, one a line."""
    widgets: dict[str, Any] = {"texts": len(texts)}
    if tuple(texts) == tuple(ours[: len(texts)]) and texts:
        return widgets, {}
    raw = "".join(f"{text}\n" for text in texts).encode()
    if not texts or lines_of(raw, flags.TEXTS_FILE) != tuple(texts):
        refuse("a text that does not stand on one line" if texts else "no text at all")
    return widgets, {"file": (flags.TEXTS_FILE, raw)}


def set_mode(texts: Sequence[str], ours: Sequence[str]) -> tuple[dict[str, Any], dict[str, File]]:
    """(widgets, files) of the mode of a text set."""
    widgets, files = text_set(texts, ours)
    return {"mode": SET, **widgets}, files
