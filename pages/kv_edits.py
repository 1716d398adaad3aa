"""The experiments of the page on the KV cache that edit one: swap, map, knock-out, and the whole library."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
import streamlit as st

from engram_lab.lab.app import asked, page, runner
from engram_lab.lab.ask.parts import SEED, SWAPPED
from engram_lab.lab.draw import cache, labels
from engram_lab.lab.fronts import kv_knockout, kv_map, kv_set, kv_swap
from engram_lab.models.handle import Handle
from engram_lab.pages import kv_scenario
from engram_lab.pages.kv_scenario import Request
from engram_lab.probes.base import Report
from engram_lab.probes.kv.knockout import HOWS, TARGETS, UNRELATED, KnockoutConfig
from engram_lab.probes.kv.map import MapConfig
from engram_lab.probes.kv.scenario import prepare
from engram_lab.probes.kv.set import SetConfig
from engram_lab.probes.kv.swap import SwapConfig

GROUPS = 6  # of layers, that the map opens with
ANY = "any layers"


def swap(request: Request) -> None:
    """The ladder, the prompt coloured by what each position recovers alone, and the answers."""
    row = st.container(horizontal=True, vertical_alignment="bottom")
    part = asked.choice(SWAPPED, row)
    k = tuple(asked.several(kv_swap.SIZES, kv_swap.SIZES.offered, row))
    draws = asked.number(kv_swap.DRAWS, row, width=130)
    seed = asked.number(SEED, row, width=120)
    layers = tuple(asked.listed(kv_swap.LAYERS, range(request.handle.n_layers), row, placeholder="all", width=220))
    config = SwapConfig(
        request.models, request.scenario, part, layers or None, k, k, k, draws, request.align, seed
    )  # fmt: skip
    report = runner.run("kv swap", config)
    if report is None:
        return
    kv_scenario.the_oracle(report)
    result, mode = report.result, runner.mode()
    drawn = {"ladder": kv_swap.figure(report, mode), "answers": kv_swap.answers(report, mode)}
    kv_scenario.chart(drawn["ladder"], "ladder")
    kv_scenario.the_prompt(
        report, kv_swap.single_recovery(report), ", coloured by what each recovers when it alone is swapped"
    )
    kv_scenario.chart(drawn["answers"], "answers")
    with st.expander("The ladder in numbers"):
        st.dataframe(pd.DataFrame(kv_swap.ladder_table(report)), hide_index=True, height="content")
        st.caption(
            f"Swapped with itself the cache gives {_bits(result.self_equal)} as the clean old prompt; all from the "
            f"new one gives {_bits(result.all_equal)} as the clean new prompt. Neither source cache was changed "
            f"(digests {' and '.join(result.digests)})."
        )
    kv_scenario.finish(report, drawn)


def _bits(equal: bool) -> str:
    return "the same bits" if equal else "other bits"


def clicked(names: Sequence[str]) -> None:
    """Take the cell that was clicked on the map, in layers of these names, as the one to look at."""
    points = st.session_state["map"].selection.points
    if points:
        st.session_state["kv_pos"] = int(points[0]["x"])
        st.session_state["kv_group"] = names[int(points[0]["y"])]


def recovery_map(request: Request) -> None:
    """Position x layers; a cell by a click or by number, and the prompt coloured by its layers."""
    row = st.container(horizontal=True, vertical_alignment="bottom")
    part = asked.choice(SWAPPED, row)
    n_layers = request.handle.n_layers
    page.keep_within("groups", range(n_layers + 1), min(GROUPS, n_layers))
    groups = asked.number(
        kv_map.LAYER_GROUPS, row, 0, n_layers, min(GROUPS, n_layers), width=150,
        help=f"Neighbouring layers swapped together; 0 or {n_layers}: each by itself.",
    )  # fmt: skip
    report = runner.run("kv map", MapConfig(request.models, request.scenario, groups, part, request.align))
    if report is None:
        return
    kv_scenario.the_oracle(report)
    result = report.result
    figure = kv_map.figure(report, runner.mode())
    with st.container(key="map_scroll"):
        st.plotly_chart(
            figure, theme=None, width=int(figure.layout.width), key="map", selection_mode="points",
            on_select=partial(clicked, result.group_names),
            config={"displayModeBar": False},
        )  # fmt: skip
    st.caption("Click a cell to read it below.")
    cells = st.container(horizontal=True, vertical_alignment="bottom")
    last = result.pair.n_editable - 1
    start = result.pair.field_start
    page.keep_within("kv_pos", range(last + 1), start)
    position = int(cells.number_input("Position", 0, last, start, key="kv_pos", bind="query-params", width=130))
    offered = [ANY, *result.group_names]
    page.keep_within("kv_group", offered, ANY)
    chosen = cells.selectbox("Layers", offered, key="kv_group", bind="query-params", width=150)
    group = offered.index(chosen) - 1
    cells.markdown(labels.markdown(cell(report, position, group)))
    shown = kv_map.single_recovery(report)
    if group >= 0:
        shown = {p: float(result.recovery[group, p]) for p in shown}
    which = "at most, in some layers" if group < 0 else f"in layers {chosen}"
    kv_scenario.the_prompt(report, shown, f", coloured by what each recovers alone {which}")
    kv_scenario.finish(report, {"map": figure})


def cell(report: Report, position: int, group: int) -> str:
    """A cell of the map in a sentence; of any layers (-1) the one that recovers most."""
    result = report.result
    text = result.pair.token_texts_old[position]
    if not result.differs[position]:
        return f'Position {position} ("{text}"): both caches are the same here.'
    best = group if group >= 0 else int(np.argmax(np.nan_to_num(result.recovery[:, position], nan=-np.inf)))
    return (
        f'Position {position} ("{text}"), layers {result.group_names[best]}: recovers '
        f"{result.recovery[best, position]:.1%} alone, the answer "
        f"{'changes' if result.flip[best, position] else 'stays'}; KL to the new prompt's run "
        f"{result.kl[best, position]:.4g} nats."
    )


def knockout(request: Request) -> None:
    """What is left of the right answer's margin, and the two published observations on this prompt."""
    pair = prepare(request.handle, request.scenario, request.align)
    row = st.container(horizontal=True, vertical_alignment="bottom")
    targets = asked.several(kv_knockout.TARGETS, TARGETS[:3], row, TARGETS[:3])
    hows = asked.several(kv_knockout.HOWS, HOWS, row, HOWS)
    tokens = cache.tokens_of(pair)
    positions = asked.listed(kv_knockout.POSITIONS, range(pair.n_editable), row, placeholder="none", width=200,
        format_func=lambda p: f"{p} {labels.short(tokens[p].label, 12)}",
    )  # fmt: skip
    draws = asked.number(kv_knockout.DRAWS, row, width=120)
    seed = asked.number(SEED, row, width=120)
    unrelated = UNRELATED
    if "unrelated" in hows:
        unrelated = asked.text(kv_knockout.UNRELATED, value=UNRELATED, height=90)
    chosen = (*targets, *(["positions"] if positions else []))
    if not chosen or not hows:
        st.info("Pick at least one part to knock out, and one way to do it.")
        return
    report = runner.run(
        "kv knockout",
        KnockoutConfig(
            request.models, request.scenario, chosen, tuple(hows), tuple(positions), unrelated, draws, request.align,
            seed,
        ),
    )  # fmt: skip
    if report is None:
        return
    kv_scenario.the_oracle(report)
    result = report.result
    if result.left_out:
        st.info(f"This prompt has no position of: {', '.join(result.left_out)}.")
    for anecdote in result.anecdotes:
        st.markdown(f"{labels.markdown(anecdote.claim)} **{labels.markdown(anecdote.said)}**")
    figure = kv_knockout.figure(report, runner.mode())
    kv_scenario.chart(figure, "knockouts")
    kv_scenario.the_prompt(report, None, "")
    kv_scenario.finish(report, {"knockouts": figure})


def library(handle: Handle) -> None:
    """All scenarios as one table by kind of question."""
    scenarios, box = kv_scenario.the_library()
    row = st.container(horizontal=True, vertical_alignment="bottom")
    chat = row.toggle("All in the chat template", key="chat_all", bind="query-params")
    align = kv_scenario.split_toggle(row, "split_all", False)
    with st.container(width=420):
        seed, bootstrap = page.resampling()
    kv_scenario.take_library(box, scenarios)
    if chat:
        scenarios = tuple(dataclasses.replace(own, chat=True) for own in scenarios)
    report = runner.run("kv set", SetConfig((handle.name,), scenarios, align, seed, bootstrap))
    if report is None:
        return
    result = report.result
    n = len(result.ids)
    st.markdown(
        f"**{labels.markdown(handle.name)} gets both clean prompts of {int(result.right.sum())} of the {n} scenarios "
        f"right; {n - int(result.served.sum())} were refused. The means are over those that it gets right.**"
    )
    figure = kv_set.figure(report, runner.mode())
    kv_scenario.chart(figure, "by_kind")
    st.dataframe(pd.DataFrame(kv_set.kind_table(report)), hide_index=True, height="content")
    with st.expander("Every scenario, with the reason where it is left out"):
        st.dataframe(pd.DataFrame(kv_set.scenario_table(report)), hide_index=True, height="content")
    kv_scenario.finish(report, {"kinds": figure})
