"""What the views of the probes of facts share: the user, and how the facts are written; light imports.

The page asks for what lab.app.fact_users.take_up puts back, the facts of its table with it. So a view need not make all
of a request: of a setting that the page does not offer, its widget stays as it is, and the page says that it differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import widgets

if TYPE_CHECKING:
    from engram_lab.lab.ask.view import View

METHODS = {"optimised": "optimised", "closed form": "closed_form"}  # in the words of the page
STEPS = 200  # of the optimised method at most, on the page


def settled(report: Any) -> Any:
    """The request of a report with the layer that was written at."""
    from dataclasses import replace

    config = report.config
    return replace(config, writing=replace(config.writing, layer=report.result.layer))


def view(name: str, config: Any, shown: dict[str, Any]) -> View:
    """The page of a request, one of its views by name."""
    writing = config.writing
    shown = {
        **widgets.models(config.models),
        "facts_view": name,
        "facts_user": writing.user,
        "facts_method": widgets.one_of("the method", writing.method, METHODS),
        **shown,
    }
    if writing.steps <= STEPS:
        shown["facts_steps"] = writing.steps
    if writing.layer is not None:
        shown["facts_layer"] = writing.layer
    return widgets.view("facts", shown)


def unrelated(key: str, texts: tuple[str, ...]) -> dict[str, int]:
    """The box of how many of our sentences the unrelated texts are, if they are such."""
    from engram_lab.lab.ask.texts import held_out

    return {key: len(texts)} if texts == held_out()[: len(texts)] else {}
