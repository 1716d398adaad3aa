"""What several pages share: the prompt box, tokens, text sets, a map and a place in it, the protocol, exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from engram_lab.lab.app import asked, keeping, runner, uploads
from engram_lab.lab.ask import texts
from engram_lab.lab.ask.parts import BOOTSTRAP, SEED, YOUR_OWN
from engram_lab.lab.draw import labels
from engram_lab.lab.fronts import entry, export
from engram_lab.probes.base import Report

if TYPE_CHECKING:
    from engram_lab.models.handle import Handle

WINDOW = 64  # positions of a map at once
_MANY = 10**9


def keep_within(key: str, options: Sequence[Any], otherwise: Any) -> None:
    """Replace a choice that the present request does not offer any more."""
    if key in st.session_state and st.session_state[key] not in options:
        st.session_state[key] = otherwise


def mode_switch() -> str:
    """One prompt or a text set: texts.ONE or texts.SET, the same on all pages that have both."""
    chosen: str = st.segmented_control(
        "Mode",
        [texts.ONE, texts.SET],
        default=texts.ONE,
        required=True,
        label_visibility="collapsed",
        key="mode",
        bind="query-params",
    )
    return chosen


def _use_example() -> None:
    for example in texts.examples():
        if example["title"] == st.session_state["example"]:
            st.session_state["prompt"] = example["prompt"]
            _look_at_the_end()


def _look_at_the_end() -> None:
    """For another prompt, inspect its last position again and show the map from its start."""
    st.session_state.update({"pos": -1, "from": 0})


def prompt_box(beside: Callable[[], object] | None = None) -> str:
    """The prompt, with our examples to pick from; the same on all pages. `beside` draws more widgets at its right."""
    examples = texts.examples()
    titles = {example["prompt"]: example["title"] for example in examples}
    current = st.session_state.get("prompt", st.query_params.get("prompt", examples[0]["prompt"]))
    st.session_state["example"] = titles.get(current, YOUR_OWN)
    left, right = st.columns([3, 2])
    with right:
        st.selectbox("Example", [*titles.values(), YOUR_OWN], key="example", on_change=_use_example)
        if beside is not None:
            beside()
    with left:
        prompt: str = st.text_area(
            "Prompt", examples[0]["prompt"], height=124, key="prompt", bind="query-params",
            on_change=_look_at_the_end, help="Ctrl+Enter runs it, and so does leaving the box.",
        )  # fmt: skip
    why = next((example["why"] for example in examples if example["prompt"] == prompt), None)
    if why:
        st.caption(labels.markdown(why))
    return prompt


def tokens_of(handle: Handle, prompt: str) -> list[labels.Token]:
    """The tokens that a model gets for a prompt."""
    ids = handle.encode(prompt)
    pieces = handle.pieces(ids)
    return [labels.Token(i, piece, handle.is_special(i)) for i, piece in zip(ids, pieces, strict=True)]


def show_tokens(opened: Sequence[Handle], prompt: str) -> None:
    """The tokens of the prompt as chips, once for models that agree."""
    found: list[tuple[list[labels.Token], list[Handle]]] = []
    for handle in opened:
        tokens = tokens_of(handle, prompt)
        same = next((handles for known, handles in found if known == tokens), None)
        if same is None:
            found.append((tokens, [handle]))
        elif handle not in same:
            same.append(handle)
    for tokens, handles in found:
        st.html(labels.chips(tokens))
        whose = " and ".join(labels.markdown(h.name) for h in handles)
        exact = "" if labels.gives_back(tokens, prompt) else "; this tokenizer changes the text"
        st.caption(f"{len(tokens)} tokens for {whose}, each with its id (hover for its bytes){exact}")


def namer(handle: Handle) -> Callable[[int], str]:
    """Token id -> visible label, for one model."""
    return lambda token_id: labels.label(handle.pieces([token_id], whole=False)[0])


def _take_all_texts() -> None:
    """For another file, use all of it; what is too many is cut down to what there is."""
    st.session_state["texts"] = _MANY


def text_set(default: Sequence[str], label: str = "without a file, the sentences that we wrote") -> tuple[str, ...]:
    """A text set: an upload or `default`, the first so many of it."""
    left, right = st.columns([3, 1])
    with left:
        file = uploads.upload(f"Your own texts (UTF-8, one on each line, or .jsonl); {label}", "file", _take_all_texts)
    lines = tuple(default) if file is None else texts.texts_of(file.data, file.name)
    if st.session_state.get("texts", 0) > len(lines):
        st.session_state["texts"] = len(lines)
    n = right.number_input(
        "Texts", 1, len(lines), len(lines), key="texts", bind="query-params", help="The first so many."
    )
    return lines[: int(n)]


def resampling() -> tuple[int, int]:
    """(seed, number of resamples) of the bootstrap, in two columns of the present container."""
    a, b = st.columns(2)
    bootstrap = asked.number(BOOTSTRAP, a)
    return asked.number(SEED, b), bootstrap


def one_or_set(one_prompt: Callable[[], None], text_set: Callable[[], None]) -> None:
    """The switch between the two, and the chosen one."""
    (text_set if mode_switch() == texts.SET else one_prompt)()


def map_window(container: st.delta_generator.DeltaGenerator, n_tokens: int) -> tuple[int, int]:
    """The positions [start, end) of a prompt that the map shows; end may lie behind the prompt's."""
    starts = list(range(0, n_tokens, WINDOW))
    keep_within("from", starts, 0)
    start: int = container.selectbox(
        "From position", starts, key="from", bind="query-params", disabled=len(starts) == 1, width=150,
        help=f"The map shows {WINDOW} positions at a time.",
    )  # fmt: skip
    return start, start + WINDOW


def show_map(figure: go.Figure, clicked: Callable[[], None]) -> None:
    """The map, in a box of its own that scrolls; `clicked` runs when a cell is."""
    with st.container(key="map_scroll"):
        st.plotly_chart(
            figure,
            theme=None,
            width=int(figure.layout.width),
            key="map",
            on_select=clicked,
            selection_mode="points",
            config={"displayModeBar": False},
        )


@dataclass(frozen=True)
class Place:
    """A position of the prompt and a memory layer of a model."""

    handle: Handle
    ids: tuple[int, ...]
    position: int
    layer: int


def choose_place(prompt: str) -> Place:
    """The chosen model's tokens, then widgets for position and memory layer.

    Of the two models in the sidebar the first that has a memory, or a choice where both have one. LabError where
    neither has, or for a bad prompt.
    """
    opened = {handle.name: handle for handle in runner.handles(runner.chosen_models())}
    able = [name for name, handle in opened.items() if handle.engram_layers]
    if not able:
        from engram_lab.models.tables import memories

        memories(next(iter(opened.values())))  # says so
    controls = st.container(horizontal=True)
    name = able[0]
    if len(able) > 1:
        keep_within("of", able, able[0])
        name = controls.selectbox("Model shown", able, key="of", bind="query-params", width=230)
    handle = opened[name]
    ids = handle.encode(prompt)
    last = len(ids) - 1
    keep_within("pos", range(len(ids)), last)
    position = controls.number_input(
        "Position",
        0,
        last,
        last,
        key="pos",
        bind="query-params",
        width=150,
        help="Of the token whose n-grams are read.",
    )
    layers = list(handle.engram_layers)
    keep_within("memory", layers, layers[0])
    layer = controls.selectbox(
        "Memory layer", layers, key="memory", bind="query-params", width=150, help="The blocks that have a memory."
    )
    show_tokens([handle], prompt)
    return Place(handle, ids, int(position), int(layer))


def how(report: Report, formula: str, meaning: str) -> None:
    """The formula and the protocol, folded away under a chart."""
    with st.expander("How this is computed, and with what"):
        st.latex(entry.rows(formula))
        st.markdown(meaning)
        protocol = report.protocol.to_dict()
        st.dataframe(pd.DataFrame(protocol["models"]), hide_index=True)
        versions = ", ".join(f"{name} {version}" for name, version in protocol["versions"].items())
        st.caption(labels.markdown(f"seed {protocol['seed']}; {versions}"))


def exports(
    report: Report,
    drawn: Mapping[str, go.Figure],
    attachments: Callable[[], Mapping[str, bytes]] | None = None,
) -> None:
    """Keep the run in a session; files made when they are asked for, and the request to run elsewhere.

    `attachments` gives files that are kept with the run, by name.
    """
    keeping.keep(report, attachments)
    st.subheader("Take it with you")
    probe, reason = report.probe, export.no_png()
    with st.container(horizontal=True):
        # A function as data: made at the click, so that an unchanged page stays fast.
        st.download_button(
            "CSV", partial(export.csv_text, report), f"{probe}.csv", "text/csv", key="csv", on_click="ignore",
            icon=":material/table:",
        )  # fmt: skip
        st.download_button(
            "JSON", report.to_json, f"{probe}.json", "application/json", key="json",
            on_click="ignore", icon=":material/data_object:",
        )  # fmt: skip
        for name, figure in drawn.items():
            st.download_button(
                f"PNG, {name}", partial(export.png, figure), f"{probe}-{name}.png", "image/png", key=f"png_{name}",
                on_click="ignore", icon=":material/image:", disabled=reason is not None, help=reason,
            )  # fmt: skip
        for name, text in export.files(probe, report.config).items():
            st.download_button(
                name, text, name, "text/plain", key=f"file_{name}", on_click="ignore", icon=":material/description:",
                help="What the command or the program below reads.",
            )  # fmt: skip
    command, program = st.tabs(["Command line", "Python"])
    command.code(export.command_line(probe, report.config), language="bash")
    program.code(export.python(probe, report.config), language="python")
