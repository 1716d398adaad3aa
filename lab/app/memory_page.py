"""What pages about one place in the memory share: the model, the position and the memory layer."""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

from engram_lab.lab.app import page, runner
from engram_lab.models.handle import Handle
from engram_lab.models.memory import memories


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
        memories(next(iter(opened.values())))  # says so
    controls = st.container(horizontal=True)
    name = able[0]
    if len(able) > 1:
        page.keep_within("of", able, able[0])
        name = controls.selectbox("Model shown", able, key="of", bind="query-params", width=230)
    handle = opened[name]
    ids = handle.encode(prompt)
    last = len(ids) - 1
    page.keep_within("pos", range(len(ids)), last)
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
    page.keep_within("memory", layers, layers[0])
    layer = controls.selectbox(
        "Memory layer", layers, key="memory", bind="query-params", width=150, help="The blocks that have a memory."
    )
    page.show_tokens([handle], prompt)
    return Place(handle, ids, int(position), int(layer))
