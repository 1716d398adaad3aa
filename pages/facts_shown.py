"""What the page on facts shows: the check of what is written, any prompt before and after, and the sets on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
import torch

from engram_lab.lab.app import asked, page, runner
from engram_lab.lab.ask import texts
from engram_lab.lab.draw import labels
from engram_lab.lab.draw.theme import PALETTES, translucent
from engram_lab.lab.fronts import facts_alternatives, facts_check, facts_density, facts_layers, reference
from engram_lab.models.handle import Handle
from engram_lab.models.memory import Edit, read_memory
from engram_lab.models.overlay import Stack, prepare
from engram_lab.pages import facts_writing
from engram_lab.pages.facts_writing import User, Written
from engram_lab.probes.base import Record, Report
from engram_lab.probes.facts.density import SIZES, DensityConfig
from engram_lab.probes.facts.layers import LayersConfig
from engram_lab.probes.facts.sets import StatedFact, Writing, kl_of

STACKED = "all users, stacked"
TOP = 8  # next tokens
UNRELATED = 20  # texts for the alternatives, which train a LoRA each time


def _frame(rows: Sequence[Mapping[str, str]]) -> None:
    st.dataframe(pd.DataFrame(rows), hide_index=True, height="content")


def _chart(figure: go.Figure, key: str) -> None:
    st.plotly_chart(figure, theme=None, key=key, config={"displayModeBar": False})


def finish(
    report: Report, drawn: Mapping[str, go.Figure], attachments: Callable[[], Mapping[str, bytes]] | None = None
) -> None:
    """The formula, what each figure means, the protocol; then the exports, and the files kept with the run."""
    page.how(report, *reference.shown(report.probe))
    page.exports(report, drawn, attachments)


# --- The check -------------------------------------------------------------------------------------------------------


def learned(report: Report) -> dict[str, go.Figure]:
    """Did it learn: recall, paraphrases and neighbours before and after, and the gate against its ceiling."""
    st.subheader("Did it learn?")
    result, asked = report.result, report.result.facts
    n = len(report.config.facts)
    st.markdown(
        f"**The model says {asked.top1_after.sum()} of {n} facts (before: {asked.top1_before.sum()}), and has "
        f"{asked.top5_after.sum()} among its five likeliest (before: {asked.top5_before.sum()}).** The gate at "
        f"the triggers is {result.gate_before.mean():.2f} before and {result.gate_after.mean():.2f} after, of at most "
        f"{result.gate_ceiling:.2f} at unit norm weights and {result.gate_ceiling_learned:.2f} with the learned ones; "
        f"{result.rows} rows, {result.overlay_bytes:,} bytes."
    )
    figure = facts_check.figure(report, runner.mode())
    _chart(figure, "recall")
    _frame(facts_check.fact_table(report))
    with st.expander("Scores, paraphrases, neighbours and compositions in numbers"):
        _frame(facts_check.score_table(report))
        for kind in ("paraphrases", "neighbours", "compositions"):
            if getattr(result, kind).prompts:
                st.caption(kind.capitalize())
                _frame(facts_check.asked_table(report, kind))
    return {"recall": figure}


def changed(report: Report) -> dict[str, go.Figure]:
    """What else changed: every comparison of bits, green only where all are equal, and what changes behind."""
    st.subheader("What else changed?")
    st.markdown(f"**{labels.markdown(facts_check.locality_sentence(report))}**")
    colours = PALETTES[runner.mode()].series
    shade = {
        "bits equal": f"background-color: {translucent(colours[2], 0.3)}",
        "bits differ": f"background-color: {translucent(colours[1], 0.4)}",
    }
    rows = pd.DataFrame(facts_check.check_table(report))
    rows.insert(1, "bits", rows.pop("verdict"))
    st.dataframe(
        rows.style.map(lambda verdict: shade.get(verdict, ""), subset=["bits"]),
        hide_index=True,
        height="content",
        column_config={name: st.column_config.TextColumn(width="large") for name in ("left out", "exceptions")},
    )
    exceptions = [
        {
            "check": facts_check.CHECKS[own.name],
            "text": found.text,
            "positions that differ": str(found.positions),
            "first": str(found.first),
            "largest gap, logits": f"{found.largest:.3g}",
            "largest KL, nats": f"{found.kl:.3g}",
            "why": found.why,
        }
        for own in report.result.locality.checks
        for found in own.exceptions
    ]
    if exceptions:
        st.caption("Every exception")
        _frame(exceptions)
    figure = facts_check.locality(report, runner.mode())
    _chart(figure, "locality")
    return {"locality": figure}


def addresses(report: Report) -> None:
    """Who else shares the address: facts, other prompts with what they now say, and partial collisions."""
    st.subheader("Who else shares the address?")
    st.markdown(f"**{labels.markdown(facts_check.addresses_sentence(report))}** A row is addressed by the last few "
                "canonical tokens alone: whoever ends a prompt with them reads it too.")  # fmt: skip
    if report.result.aliases.prompts:
        _frame(facts_check.asked_table(report, "aliases"))
    else:
        st.caption("No other prompt at these addresses was found.")
    partial = facts_check.partial_table(report)
    with st.expander(f"Partial collisions: {len(partial)} texts that read some of the rows"):
        if partial:
            _frame(partial)


# --- Any prompt ------------------------------------------------------------------------------------------------------


def a_prompt(handle: Handle, user: User, own: Written) -> None:
    """Any prompt before and after: the tokens whose rows are replaced, and what may come next."""
    st.subheader("Any prompt, before and after")
    written = {
        name: other.written[handle.fingerprint].overlay
        for name, other in facts_writing.users(handle).items()
        if handle.fingerprint in other.written
    }
    left, right = st.columns([3, 1], vertical_alignment="bottom")
    prompt = left.text_input(
        "Prompt",
        own.facts[0].trigger,
        key=f"facts_prompt.{user.name}",
        help="Whatever ends like a trigger reads its rows.",
    )
    whose = user.name
    if len(written) > 1:
        names = [*written, STACKED]
        page.keep_within("facts_whose", names, user.name)
        whose = right.selectbox("Read by", names, index=names.index(user.name), key="facts_whose")
    stack = Stack(tuple(written.values())) if whose == STACKED else Stack((written[whose],))
    ids = handle.encode(prompt)
    with runner.turn([handle], "the prompt before and after"):
        before, after = read_memory(handle, [ids]), read_memory(handle, [ids], Edit(overlays=prepare(handle, stack)))
        reads = facts_writing.edited(handle, stack, ids).tolist()
    same = (before.logits == after.logits).all(-1)[0]
    st.html(chips(handle, prompt, reads))
    marked = sum(count > 0 for count in reads)
    differ = int((~same).sum())
    first = int((~same).nonzero()[0]) if differ else 0
    st.markdown(
        f"**{marked} of {len(ids)} tokens read replaced rows (framed); "
        + (f"{len(ids) - differ} positions have the same bits before and after, the first that differs is {first}; "
           f"KL at the last one {float(kl_of(before.logits, after.logits)[0, -1]):.4g} nats.**"
           if differ else "every logit has the same bits before and after.**")
    )  # fmt: skip
    _frame(next_tokens(handle, before.logits[0, -1], after.logits[0, -1]))
    conflicts = stack.conflicts()
    if whose == STACKED:
        st.caption(
            f"{len(conflicts)} rows get different vectors from different users; the one who is later in the list of "
            "users is read. Read each by themselves, in one batch or alone, users see only their own rows."
        )


def chips(handle: Handle, prompt: str, reads: Sequence[int]) -> str:
    """The prompt's tokens, framed and shaded where rows are replaced; `reads` [pos] says how many."""
    accent, most = PALETTES[runner.mode()].accent, max(*reads, 1)

    def look(position: int) -> labels.Look:
        count = reads[position]
        style = f"border: 2px solid {accent}; background: {translucent(accent, 0.35 * count / most)}" if count else ""
        return labels.Look(f"{count} rows replaced", style, "replaced" if count else "")

    return labels.chips(page.tokens_of(handle, prompt), look)


def next_tokens(handle: Handle, before: torch.Tensor, after: torch.Tensor) -> list[dict[str, str]]:
    """The likeliest next tokens of logits [vocab] before and after, with both probabilities of each."""
    name = page.namer(handle)
    chance = [logits.float().softmax(-1) for logits in (before, after)]
    top = [own.topk(min(TOP, len(own))).indices.tolist() for own in chance]
    return [
        {
            "rank": str(n),
            "next before": name(a),
            "before": f"{chance[0][a]:.4f}",
            "then after": f"{chance[1][a]:.4f}",
            "next after": name(b),
            "after": f"{chance[1][b]:.4f}",
            "was before": f"{chance[0][b]:.4f}",
        }
        for n, (a, b) in enumerate(zip(*top, strict=True), 1)
    ]


# --- Sets on demand --------------------------------------------------------------------------------------------------


def _asked(probe: str, config: Record) -> Report | None:
    """The report of a set once its button was pressed; another request waits for another press."""
    kept: dict[str, Record] = st.session_state.setdefault("facts_sets", {})
    if st.button("Run", key="facts_run", type="primary", icon=":material/play_arrow:"):
        kept[probe] = config
    if probe not in kept:
        st.caption("Nothing runs before you press Run; results are kept.")
        return None
    if kept[probe].to_dict() != config.to_dict():
        st.caption("The request has changed since: press Run again to see its result.")
    return runner.run(probe, kept[probe])


def density(handle: Handle, facts: tuple[StatedFact, ...], writing: Writing) -> None:
    """Recall over the number of facts written together, and two users on top of each other."""
    offered = [n for n in SIZES if n <= len(facts)]
    sizes = asked.several(facts_density.SIZES, offered, default=offered, key=f"facts_sizes.{len(facts)}")
    stacks = asked.switch(facts_density.STACKS)
    report = _asked("facts density", DensityConfig((handle.name,), facts, writing, tuple(sizes), stacks))
    if report is None:
        return
    figure = facts_density.figure(report, runner.mode())
    _chart(figure, "density")
    _frame(facts_density.density_table(report))
    if report.result.stacks:
        st.caption("Two users on top of each other")
        _frame(facts_density.stack_table(report))
    finish(report, {"density": figure})


def layers(handle: Handle, facts: tuple[StatedFact, ...], writing: Writing) -> None:
    """The same facts at each memory layer."""
    free = Writing(writing.user, None, writing.method, writing.steps, writing.rate, writing.pull)
    report = _asked("facts layers", LayersConfig((handle.name,), facts, free))
    if report is None:
        return
    figure = facts_layers.figure(report, runner.mode())
    _chart(figure, "layers")
    _frame(facts_layers.layer_table(report))
    finish(report, {"layers": figure})


def alternatives(handle: Handle, facts: tuple[StatedFact, ...], writing: Writing) -> None:
    """LoRA, the prompt and retrieval on the same facts."""
    row, ours = st.container(horizontal=True, vertical_alignment="bottom"), texts.held_out()
    offered = facts_alternatives.RANKS.offered
    ranks = asked.several(facts_alternatives.RANKS, offered, row, offered)
    n = asked.number(
        facts_alternatives.UNRELATED_TEXTS, row, high=len(ours), value=min(UNRELATED, len(ours)), width=160
    )
    best = asked.number(facts_alternatives.BEST, row, width=160)
    config = facts_alternatives.request(
        (handle.name,), facts, ours[:n], best, writing=writing, ranks=tuple(sorted(ranks, reverse=True))
    )
    report = _asked("facts alternatives", config)
    if report is None:
        return
    for said in facts_alternatives.sentences(report):
        st.markdown(f"- {labels.markdown(said)}")
    figure = facts_alternatives.figure(report, runner.mode())
    _chart(figure, "alternatives")
    _frame(facts_alternatives.table(report))
    finish(report, {"alternatives": figure})
