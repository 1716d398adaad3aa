"""The experiments of the page on the KV cache that go on from one: errata, writing before the answer, composition."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from engram_lab.lab.app import asked, runner
from engram_lab.lab.ask.parts import SECONDS
from engram_lab.lab.draw import labels
from engram_lab.lab.draw.durations import digits
from engram_lab.lab.fronts import kv_compose, kv_erratum, kv_reasoning
from engram_lab.lab.fronts.kv_erratum import chain_of
from engram_lab.models.handle import Handle
from engram_lab.pages import kv_scenario
from engram_lab.pages.kv_scenario import Request
from engram_lab.probes.kv.compose import ANSWERS, ComposeConfig
from engram_lab.probes.kv.erratum import ErratumConfig
from engram_lab.probes.kv.reasoning import CUE, ReasoningConfig

TEXTS = {
    "erratum": "The correction",
    "irrelevant": "A correction of something else",
    "wrong": "A correction to a wrong value",
    "third": "A third value, the wrong one",
}


def erratum(request: Request) -> None:
    """One correction with its controls, then a chain of them as a timeline."""
    words = {}
    for column, (field, word) in zip(st.columns(len(TEXTS)), TEXTS.items(), strict=True):
        words[field] = column.text_area(
            word, getattr(request.scenario, field), height=90, key=request.key(field), bind="query-params",
            help="{new}, {old} and {third} stand for the values." if field != "third" else None,
        )  # fmt: skip
    request = request.edited(words)
    row = st.container(horizontal=True, vertical_alignment="bottom")
    n = asked.number(kv_erratum.CORRECTIONS, row, width=150)
    policies = asked.several(kv_erratum.POLICIES, kv_erratum.POLICIES.offered or (), row,
        format_func=lambda m: "never" if m == 0 else str(m),
    )  # fmt: skip
    time = asked.switch(SECONDS, row)
    left, right = st.columns(2)
    wording = asked.text(kv_erratum.WORDING, left, placeholder="as the correction")
    lines = asked.text(kv_erratum.CHAIN, right, placeholder="new, old, new …")
    if not policies:
        st.info("Pick at least one policy: after how many corrections all is prefilled anew.")
        return
    report = runner.run(
        "kv erratum",
        ErratumConfig(
            request.models, request.scenario, chain_of(lines), n, wording, tuple(policies), request.align, time,
        ),
    )  # fmt: skip
    if report is None:
        return
    kv_scenario.the_oracle(report)
    result, mode = report.result, runner.mode()
    drawn = {"errata": kv_erratum.figure(report, mode)}
    kv_scenario.chart(drawn["errata"], "errata")
    st.dataframe(pd.DataFrame(kv_erratum.errata_table(report)), hide_index=True, height="content")
    if result.timing is not None:
        st.caption(
            f"The correction behind the cache took {digits(result.timing.append * 1000, 0)} ms, a full prefill "
            f"{digits(result.timing.full * 1000, 0)} ms (shortest of {result.timing.rounds} runs, "
            f"{result.timing.threads} threads)."
        )
    figure = kv_erratum.timeline(report, mode)
    if figure is None:
        st.info(labels.markdown(result.no_chain), icon=":material/info:")
    else:
        drawn["timeline"] = figure
        kv_scenario.chart(figure, "timeline")
        for said in result.chain.said:
            st.markdown(f"- {labels.markdown(said)}")
    kv_scenario.the_prompt(report, None, "")
    kv_scenario.finish(report, drawn)


def reasoning(request: Request) -> None:
    """The margin by tokens written, and what was written."""
    left, right = st.columns([2, 3])
    tokens = asked.several(kv_reasoning.TOKENS, kv_reasoning.TOKENS.offered or (), left)
    cue = asked.text(kv_reasoning.CUE, right, CUE, height=90)
    if not tokens:
        st.info("Pick at least one number of tokens.")
        return
    report = runner.run(
        "kv reasoning",
        ReasoningConfig(request.models, request.scenario, tuple(tokens), cue, request.align),
    )
    if report is None:
        return
    kv_scenario.the_oracle(report)
    figure = kv_reasoning.figure(report, runner.mode())
    kv_scenario.chart(figure, "reasoning")
    st.caption(labels.markdown(f'Then asked again: "{report.result.question.strip()}"'))
    st.dataframe(pd.DataFrame(kv_reasoning.reasoning_table(report)), hide_index=True, height="content")
    kv_scenario.the_prompt(report, None, "")
    kv_scenario.finish(report, {"reasoning": figure})


def compose(handle: Handle) -> None:
    """Three texts, cosine by tokens that run again, and the time if it is asked for."""
    prefix, block, suffix = (
        asked.text(part, column, part.ours(), height=170)
        for column, part in zip(st.columns(3), kv_compose.TEXTS, strict=True)
    )
    row = st.container(horizontal=True, vertical_alignment="bottom")
    again = asked.several(kv_compose.AGAIN, kv_compose.AGAIN.offered or (), row)
    offered = [n for n in kv_compose.LENGTHS.offered or () if n < handle.context // 2]
    lengths = asked.several(kv_compose.LENGTHS, offered, row)
    answers = asked.text(kv_compose.ANSWERS, row, ";".join(ANSWERS), width=200)
    time = asked.switch(SECONDS, row)
    report = runner.run(
        "kv compose",
        ComposeConfig(
            (handle.name,), prefix, block, suffix, tuple(text for text in answers.split(";") if text.strip()),
            tuple(again), tuple(lengths), time,
        ),
    )  # fmt: skip
    if report is None:
        return
    result, mode = report.result, runner.mode()
    st.markdown(f"**{labels.markdown(result.said)}**")
    drawn = {"compose": kv_compose.figure(report, mode)}
    kv_scenario.chart(drawn["compose"], "compose")
    st.caption(
        f"The prefix has {result.n_prefix} tokens, the suffix {result.n_suffix}; the block goes to position "
        f"{result.position}. Neither cache was changed (digests {' and '.join(result.digests)})."
    )
    st.dataframe(pd.DataFrame(kv_compose.compose_table(report)), hide_index=True, height=320)
    figure = kv_compose.compose_times(report, mode)
    if figure is not None:
        drawn["times"] = figure
        st.markdown(f"**{labels.markdown(result.timing.said)}**")
        kv_scenario.chart(figure, "times")
    kv_scenario.finish(report, drawn)
