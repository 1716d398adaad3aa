"""Pieces of the page on the KV cache: the scenario with its editor, the oracle, the prompt in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from engram_lab.lab.app import get_model, page, runner, uploads
from engram_lab.lab.ask import parts, scenarios
from engram_lab.lab.ask.parts import ALL_KINDS
from engram_lab.lab.draw import cache, labels
from engram_lab.lab.fronts import reference
from engram_lab.models.handle import Handle
from engram_lab.models.listing import list_models
from engram_lab.probes.base import Report
from engram_lab.probes.kv.effects import oracle_sentence
from engram_lab.probes.kv.scenario import Scenario

STRONGER = "smollm2-135m"


@dataclass(frozen=True)
class Request:
    """What every experiment with a scenario starts from."""

    handle: Handle
    scenario: Scenario
    align: str
    known: Scenario  # as it was before any edit
    own: str  # ends the keys of the widgets that edit it: another scenario has widgets of its own
    edits: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def models(self) -> tuple[str, ...]:
        """The one model, as a request names it."""
        return (self.handle.name,)

    def key(self, field: str) -> str:
        """The key of the widget that edits a field."""
        return f"{field}.{self.own}"

    def edited(self, edits: Mapping[str, Any]) -> Request:
        """With some more fields as a user has them."""
        edits = {**self.edits, **edits}
        return dataclasses.replace(self, edits=edits, scenario=parts.edited(self.known, edits))


def the_model() -> Handle:
    """The first model of the sidebar, and the offer of a stronger one where it is one of ours."""
    name = runner.chosen_models()[0]
    if any(info.name == name and info.where == "shipped" for info in list_models()):
        get_model.offer(
            STRONGER,
            f"{name} is far too weak for most of these questions: it shows how the experiments work, not what a "
            "model remembers.",
        )
    return runner.handles([name])[0]


# --- The scenario --------------------------------------------------------------------------------------------------


def the_library() -> tuple[tuple[Scenario, ...], st.delta_generator.DeltaGenerator]:
    """(the scenarios of a file that the user brought, else those that ship; the box of the upload)."""
    box = st.expander("Library: bring your own, or take this one with you")
    with box:
        file = uploads.upload(
            "A .jsonl, a scenario on each line; without a file, the scenarios that we wrote", "kv_file", type="jsonl"
        )
    return (scenarios.library() if file is None else scenarios.read(file.data, file.name)), box


def take_library(
    box: st.delta_generator.DeltaGenerator, library: Sequence[Scenario], edited: Sequence[Scenario] = ()
) -> None:
    """The download of a library and of a scenario that was edited."""
    whole = (*library, *(own for own in edited if all(own.id != known.id for known in library)))
    box.download_button(
        f"{len(whole)} scenarios", scenarios.written(whole), scenarios.FILE, "application/x-ndjson",
        key="kv_library", on_click="ignore", icon=":material/download:",
        help="With the one that you edited, if any: edit the file, and bring it again.",
    )  # fmt: skip


def the_scenario(handle: Handle) -> Request:
    """The picker and the editor; LabError for a scenario that is none."""
    top = st.container()
    library, box = the_library()
    yours = dataclasses.replace(library[0], id=parts.OWN, kind=parts.OWN)
    known = {own.id: own for own in library} | {parts.YOUR_OWN: yours}
    left, right = top.columns([3, 2])
    a, b = left.columns([1, 2])
    kinds = [ALL_KINDS, *dict.fromkeys(own.kind for own in library)]
    page.keep_within("kind", kinds, ALL_KINDS)
    kind = a.selectbox("Kind", kinds, key="kind", bind="query-params")
    names = [name for name, own in known.items() if kind in (ALL_KINDS, own.kind) or name == parts.YOUR_OWN]
    page.keep_within("scenario", names, names[0])
    name = b.selectbox("Scenario", names, key="scenario", bind="query-params")
    scenario = known[name]
    # Of a file, ids may come again with other texts.
    shipped = name == parts.YOUR_OWN or scenario in scenarios.library()
    own = scenario.id if shipped else parts.checksum(scenario)
    request = Request(handle, scenario, "refuse", scenario, own)
    edits: dict[str, Any] = {
        "template": left.text_area(
            "Template, with {field} once", scenario.template, height=168, key=request.key("template"),
            bind="query-params",
        )
    }  # fmt: skip
    for fields, words in (
        (("old", "new"), ("Old value", "New value")),
        (("answer_old", "answer_new"), ("Answer to the old", "Answer to the new")),
    ):
        for column, field, word in zip(right.columns(2), fields, words, strict=True):
            edits[field] = column.text_input(
                word, getattr(scenario, field), key=request.key(field), bind="query-params"
            )
    edits["chat"] = right.toggle(
        "Chat template", scenario.chat, key=request.key("chat"), bind="query-params",
        help="The prompt as a user's message in the model's chat template, and the answer as its reply.",
    )  # fmt: skip
    request = dataclasses.replace(request.edited(edits), align=split_toggle(right, "split", True))
    if request.scenario != scenario:
        defaults = {request.key(field): getattr(scenario, field) for field in edits}
        right.button("Undo my edits", key="undo", icon=":material/undo:", on_click=_undo, args=(defaults,))
    take_library(box, library, [request.scenario])
    return request


def split_toggle(container: st.delta_generator.DeltaGenerator, key: str, value: bool) -> str:
    """What to do with values of different token length, of probes.kv.scenario.ALIGN."""
    split = container.toggle(
        "Split uneven values", value, key=key, bind="query-params",
        help="Of values of different token length the shorter one is written in smaller tokens; else they are refused.",
    )  # fmt: skip
    return "split" if split else "refuse"


def _undo(defaults: Mapping[str, object]) -> None:
    st.session_state.update(defaults)


# --- What all experiments show -------------------------------------------------------------------------------------


def the_oracle(report: Report) -> None:
    """Whether the model gets both clean prompts right, first of all; then what the experiment says, in bold."""
    result = report.result
    pair, found = result.pair, result.oracle
    told = labels.markdown(oracle_sentence(pair, found))
    (st.success if found.both else st.warning)(told, icon=":material/check:" if found.both else ":material/block:")
    notes = [
        text
        for there, text in (
            (pair.split, "The values have different numbers of tokens, so that the shorter one was split."),
            (
                pair.extended,
                "The tokenizer merges the field with what is beside it: its tokens reach beyond the value.",
            ),
            (max(pair.answer_lengths) > 1, "An answer has several tokens: their first ones are compared."),
        )
        if there
    ]
    old, new = (labels.label(text.encode()) for text in pair.answer_texts)
    rows = [
        {
            "clean prompt": which,
            "value": getattr(report.config.scenario, which),
            "should answer": (old, new)[n],
            f"P({old})": f"{found.prob_old[n]:.4f}",
            f"P({new})": f"{found.prob_new[n]:.4f}",
            "most likely token": labels.label(found.top_texts[n].encode()),
        }
        for n, which in enumerate(("old", "new"))
    ]
    st.dataframe(pd.DataFrame(rows), hide_index=True)
    if notes:
        st.caption(labels.markdown(" ".join(notes)))
    said = getattr(result, "said", "")
    if found.both and said:
        st.markdown(f"**{labels.markdown(said)}**")


def the_prompt(report: Report, recovery: Mapping[int, float] | None, colour: str) -> None:
    """The old or the new prompt in place: the field framed, positions coloured; `colour` says by what."""
    new = st.toggle("Show the new prompt", key="new_prompt", bind="query-params")
    pair = report.result.pair
    st.html(cache.prompt_chips(pair, dict(recovery) if recovery else None, runner.mode(), new))
    st.caption(f"{pair.n_tokens} tokens, the field framed{colour}; the last one runs again on every cache.")


def chart(figure: go.Figure, key: str) -> None:
    """A figure without Plotly's bar of buttons."""
    st.plotly_chart(figure, theme=None, key=key, config={"displayModeBar": False})


def finish(report: Report, drawn: Mapping[str, go.Figure]) -> None:
    """The formula, what each figure means, the protocol; then the exports."""
    page.how(report, *reference.shown(report.probe))
    page.exports(report, drawn)
