"""The experiments of the page on the KV cache that edit one: swap, map, knock-out, and the whole library."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
import streamlit as st

from engram_lab.lab.app import page, runner
from engram_lab.lab.draw import cache, labels
from engram_lab.lab.fronts import kv_knockout, kv_map, kv_set, kv_swap
from engram_lab.lab.fronts.kv_swap import SIZES
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
    part = kv_scenario.part_choice(row)
    sizes = row.pills(
        "k: last, best, random", SIZES, selection_mode="multi", default=SIZES[:4], key="sizes", bind="query-params",
        help="How many positions are swapped: the last k, the k that alone recover most, and k at random behind the "
        "field.",
    )  # fmt: skip
    draws = row.number_input("Draws", 1, 100, 8, key="draws", bind="query-params", width=130, help="Of each random k.")
    seed = kv_scenario.seed_box(row)
    kv_scenario.keep_all_within("kv_layers", range(request.handle.n_layers))
    layers = row.multiselect(
        "Layers", range(request.handle.n_layers), key="kv_layers", bind="query-params", placeholder="all", width=220
    )
    k = tuple(sorted(sizes))
    report = runner.run(
        "kv swap",
        SwapConfig(
            request.models, request.scenario, part, tuple(sorted(layers)) or None, k, k, k, int(draws), request.align,
            seed,
        ),
    )  # fmt: skip
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
    part = kv_scenario.part_choice(row)
    n_layers = request.handle.n_layers
    page.keep_within("groups", range(n_layers + 1), min(GROUPS, n_layers))
    groups = row.number_input(
        "Layer groups", 0, n_layers, min(GROUPS, n_layers), key="groups", bind="query-params", width=150,
        help=f"Neighbouring layers swapped together; 0 or {n_layers}: each by itself.",
    )  # fmt: skip
    report = runner.run("kv map", MapConfig(request.models, request.scenario, int(groups), part, request.align))
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
    targets = row.pills(
        "Knock out", TARGETS[:3], selection_mode="multi", default=TARGETS[:3], key="targets", bind="query-params",
        help="The field; the notes: punctuation, line ends and special tokens behind it; all that is behind it.",
    )  # fmt: skip
    hows = row.pills("How", HOWS, selection_mode="multi", default=HOWS, key="hows", bind="query-params")
    tokens = cache.tokens_of(pair)
    kv_scenario.keep_all_within("kv_positions", range(pair.n_editable))
    positions = row.multiselect(
        "Positions too", range(pair.n_editable), key="kv_positions", placeholder="none", width=200,
        format_func=lambda p: f"{p} {labels.short(tokens[p].label, 12)}", bind="query-params",
    )  # fmt: skip
    draws = row.number_input("Draws", 1, 50, 4, key="noise", bind="query-params", width=120, help="Of random K and V.")
    seed = kv_scenario.seed_box(row)
    unrelated = UNRELATED
    if "unrelated" in hows:
        unrelated = st.text_area("The unrelated text", UNRELATED, height=90, key="unrelated", bind="query-params")
    chosen = tuple(target for target in TARGETS if target in targets) + (("positions",) if positions else ())
    if not chosen or not hows:
        st.info("Pick at least one part to knock out, and one way to do it.")
        return
    report = runner.run(
        "kv knockout",
        KnockoutConfig(
            request.models, request.scenario, chosen, tuple(how for how in HOWS if how in hows),
            tuple(sorted(positions)), unrelated, int(draws), request.align, seed,
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
