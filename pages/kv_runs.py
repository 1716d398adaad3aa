"""The experiments of the page on the KV cache that go on from one: errata, writing before the answer, composition."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from engram_lab.lab.app import runner
from engram_lab.lab.draw import labels
from engram_lab.lab.draw.durations import digits
from engram_lab.lab.fronts import kv_compose, kv_erratum, kv_reasoning
from engram_lab.lab.fronts.kv_compose import AGAIN, LENGTHS
from engram_lab.lab.fronts.kv_erratum import POLICIES, chain_of
from engram_lab.lab.fronts.kv_reasoning import TOKENS
from engram_lab.models.handle import Handle
from engram_lab.pages import kv_scenario
from engram_lab.pages.kv_scenario import Request
from engram_lab.probes.kv.compose import ANSWERS, BLOCK, PREFIX, SUFFIX, ComposeConfig
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
    n = row.number_input(
        "Corrections", 0, 20, 4, key="corrections", bind="query-params", width=150, help="Of the chain; 0 for none."
    )
    policies = row.pills(
        "Prefilled anew after", POLICIES, selection_mode="multi", default=[0, 2, 1], key="policies",
        format_func=lambda m: "never" if m == 0 else str(m), bind="query-params",
        help="So many corrections; one line of the timeline for each.",
    )  # fmt: skip
    time = row.toggle("Measure seconds", key="kv_time", bind="query-params")
    left, right = st.columns(2)
    wording = left.text_input(
        "Wording of the chain's corrections", key="wording", bind="query-params", placeholder="as the correction",
        help="With {value} for the new value and, if you like, {before} for the one that it replaces.",
    )  # fmt: skip
    lines = right.text_input(
        "Chain", key="chain", bind="query-params", placeholder="new, old, new …",
        help="VALUE=ANSWER for each correction, with ; between. Without it, as many as asked for from the scenario.",
    )  # fmt: skip
    if not policies:
        st.info("Pick at least one policy: after how many corrections all is prefilled anew.")
        return
    report = runner.run(
        "kv erratum",
        ErratumConfig(
            request.models, request.scenario, chain_of(lines), int(n), wording,
            tuple(m for m in POLICIES if m in policies), request.align, time,
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
    tokens = left.pills(
        "Tokens written", TOKENS, selection_mode="multi", default=[0, 4, 16, 32], key="written", bind="query-params",
        help="The model writes so many by itself, from each cache, and is then asked once more.",
    )  # fmt: skip
    cue = right.text_area(
        "Cue",
        CUE,
        height=90,
        key="cue",
        bind="query-params",
        help="The writing follows it; may be empty.",
    )
    if not tokens:
        st.info("Pick at least one number of tokens.")
        return
    report = runner.run(
        "kv reasoning",
        ReasoningConfig(request.models, request.scenario, tuple(sorted(tokens)), cue, request.align),
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
    texts: dict[str, str] = {}
    for column, name, text in zip(
        st.columns(3), ("prefix", "block", "suffix"), (PREFIX, BLOCK, SUFFIX),
        strict=True,
    ):  # fmt: skip
        about = {"prefix": "may be empty", "block": "prefilled alone, then moved", "suffix": "asks"}[name]
        texts[name] = column.text_area(
            f"{name.capitalize()} ({about})", text, height=170, key=name, bind="query-params"
        )
    row = st.container(horizontal=True, vertical_alignment="bottom")
    again = row.pills(
        "K: tokens of the block that run again", AGAIN, selection_mode="multi", default=[0, 2, 8], key="again",
        bind="query-params", help="All of them is always tried too.",
    )  # fmt: skip
    offered = [n for n in LENGTHS if n < handle.context // 2]
    kv_scenario.keep_all_within("lengths", offered)
    lengths = row.pills(
        "More block lengths", offered, selection_mode="multi", default=[n for n in (16, 64, 256) if n in offered],
        key="lengths", bind="query-params", help="In tokens; the block is repeated or cut.",
    )  # fmt: skip
    answers = row.text_input(
        "Answers to decide among", ";".join(ANSWERS), key="decide", bind="query-params", width=200,
        help="With ; between and a space before each that has one; may be empty.",
    )  # fmt: skip
    time = row.toggle("Measure seconds", key="kv_time", bind="query-params")
    report = runner.run(
        "kv compose",
        ComposeConfig(
            (handle.name,), texts["prefix"], texts["block"], texts["suffix"],
            tuple(own for own in answers.split(";") if own.strip()), tuple(sorted(again)), tuple(sorted(lengths)), time,
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
