"""A block prefilled alone, moved behind a prefix by rotating its keys, against a full prefill."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import SECONDS, Experiment, Models
from engram_lab.lab.ask.request import Ask, Flag, Numbers, Ours, flag_of_several, refuse
from engram_lab.lab.draw import labels
from engram_lab.lab.draw.durations import digits
from engram_lab.lab.draw.figure import BELOW, SYMBOLS, line, titled
from engram_lab.lab.draw.theme import PALETTES
from engram_lab.lab.fronts.entry import NOTES, ROPE, Entry

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.compose import ComposeConfig, ComposeResult


def _ours(name: str) -> str:
    from engram_lab.probes.kv import compose

    ours: str = getattr(compose, name.upper())
    return ours


class Answers(Flag):
    """What is decided among; our answers go only with our texts."""

    def kind(self) -> dict[str, Any]:
        """Several texts."""
        return {"nargs": "*", "metavar": "TEXT"}

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The texts."""
        from engram_lab.probes.kv.compose import ANSWERS

        ours = all(getattr(args, name) is None for name in ("prefix", "block", "suffix"))
        return {"answers": tuple(args.answers if args.answers is not None else ANSWERS if ours else ())}

    def flags(self, config: ComposeConfig) -> list[str]:
        """The flag with all of them."""
        return [flag_of_several("answers", config.answers)]

    def shown(self, value: tuple[str, ...]) -> str:
        """All in one box."""
        answers = ";".join(value)
        if tuple(text for text in answers.split(";") if text.strip()) != value:
            refuse("an answer with ; in it")
        return answers


TEXTS = tuple(
    Ours(name, f"the text {what} (default: one of ours)", key=name, metavar="TEXT", ours=partial(_ours, name),
         label=f"{name.capitalize()} ({about})")
    for name, what, about in (
        ("prefix", "before the block", "may be empty"),
        ("block", "prefilled alone", "prefilled alone, then moved"),
        ("suffix", "after it", "asks"),
    )
)  # fmt: skip
ANSWERS = Answers(
    "answers", "decide among these, with their leading space (default: our four)", key="decide",
    label="Answers to decide among", tip="With ; between and a space before each that has one; may be empty.",
)  # fmt: skip
AGAIN = Numbers(
    "recompute", "first tokens of the block that run again; all is always tried too (default: 0 2 8)", [0, 2, 8],
    "again", "numbers of tokens that run again", offered=(0, 1, 2, 4, 8, 16, 32), least="*",
    label="K: tokens of the block that run again", tip="All of them is always tried too.",
)  # fmt: skip
LENGTHS = Numbers(  # of which the page offers those of less than half the model's context
    "lengths", "further lengths of the block, repeated or cut (default: 16 64 256)", [16, 64, 256], "lengths",
    "lengths", offered=(16, 32, 64, 128, 256, 512, 1024, 2048), least="*", label="More block lengths",
    tip="In tokens; the block is repeated or cut.",
)  # fmt: skip
ASK = Ask("kv compose", "kv", (Models(), Experiment("Compose"), *TEXTS, ANSWERS, AGAIN, LENGTHS, SECONDS))


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each block length and way of making it; seconds only where they were measured."""
    result, timing = report.result, report.result.timing
    for n, name in enumerate(result.names):
        at = result.lengths.tolist().index(int(result.block_length[n]))
        yield {
            "block_tokens": int(result.block_length[n]),
            "kind": result.kinds[n],
            "name": name,
            "k": int(result.k[n]),
            "position": result.position,
            "computed_tokens": int(result.computed[n]),
            "full_tokens": int(result.full_tokens[at]),
            "cosine": float(result.cosine[n]),
            "kl_nats": float(result.kl[n]),
            "largest_difference_logits": float(result.largest_difference[n]),
            "same_top": bool(result.same_top[n]),
            "same_decision": bool(result.same_decision[n]),
            "top_text": result.top_texts[n],
            "decision": result.decisions[n],
            "seconds": "" if timing is None else float(timing.seconds[n]),
            "seconds_full": "" if timing is None else float(timing.full[at]),
            "seconds_continued": "" if timing is None else float(timing.continued[at]),
        }


def figure(report: Report, mode: Mode = "light", handles: Sequence[Handle] = ()) -> go.Figure:
    """Logit cosine with the full prefill by the tokens of the block that run again, a line for each block length."""
    result, palette = report.result, PALETTES[mode]
    figure = titled(
        mode,
        "How near a moved block comes to a full prefill",
        labels.plotly(
            f"cosine over the whole vocabulary; hollow: another answer; K = all is the full prefill; {result.name}"
        ),
        450,
        legend=BELOW,
        margin={"b": 110},
    )
    for series, length in enumerate(result.lengths.tolist()):
        mine = _at(result, length)
        figure.add_scatter(
            x=[result.names[n] for n in mine],
            y=result.cosine[mine],
            name=f"block of {length} tokens" + (", as given" if series == 0 else ""),
            marker={
                "size": 10,
                "symbol": [SYMBOLS[series % len(SYMBOLS)] + ("" if _same(report, n) else "-open") for n in mine],
                "line": {"width": 2},
            },
            hovertext=[_compose_hover(report, n) for n in mine],
            hoverinfo="text",
            **line(mode, series % 5),
        )
    controls = [n for n, kind in enumerate(result.kinds) if kind in ("unrotated", "left out")]
    figure.add_scatter(
        x=[result.names[n] for n in controls],
        y=result.cosine[controls],
        name="control, block as given",
        mode="markers",
        marker={
            "size": 11,
            "color": palette.quiet,
            "symbol": ["x-thin" if _same(report, n) else "x-thin-open" for n in controls],
            "line": {"width": 2, "color": palette.quiet},
        },
        hovertext=[_compose_hover(report, n) for n in controls],
        hoverinfo="text",
    )
    figure.update_xaxes(title_text="tokens of the block that run again behind the prefix", type="category")
    figure.update_yaxes(title_text="cosine with the full prefill's logits")
    return figure


def _at(result: ComposeResult, length: int) -> list[int]:
    """The variants of a block length that are no controls."""
    return [
        n for n, own in enumerate(result.block_length.tolist()) if own == length and result.kinds[n] in ("moved", "all")
    ]


def _same(report: Report, n: int) -> bool:
    """Whether a variant answers as the full prefill does."""
    result = report.result
    return bool(result.same_decision[n] if report.config.answers else result.same_top[n])


def _compose_hover(report: Report, n: int) -> str:
    result = report.result
    decision = f"; decides for {labels.plotly(result.decisions[n].strip())}" if report.config.answers else ""
    return (
        f"<b>{result.names[n]}, block of {result.block_length[n]} tokens</b><br>cosine {result.cosine[n]:.6f}"
        f"<br>KL(full ‖ composed) {result.kl[n]:.4g} nats<br>top token "
        f"{labels.plotly(labels.label(result.top_texts[n].encode()))} "
        f"({'the same' if result.same_top[n] else 'another'}){decision}<br>{result.computed[n]} tokens computed"
    )


def compose_times(report: Report, mode: Mode = "light") -> go.Figure | None:
    """Seconds by block length, composed and prefilled; None where no time was measured."""
    result, timing = report.result, report.result.timing
    if timing is None:
        return None
    order = np.argsort(result.lengths)
    lengths = result.lengths[order]
    figure = titled(
        mode,
        "Whether composing pays",
        labels.plotly(
            f"shortest of {timing.rounds} runs, {timing.threads} threads, both caches at hand; {result.name}"
        ),
        450,
        legend=BELOW,
        margin={"b": 110},
    )
    drawn = [("full prefill", timing.full[order]), ("block and suffix after the prefix", timing.continued[order])]
    for k in timing.k:
        at = {
            int(result.block_length[n]): timing.seconds[n]
            for n in range(len(result.names))
            if result.kinds[n] == "moved" and result.k[n] == k
        }
        drawn.append((f"composed, K = {k}", np.array([at.get(int(length), np.nan) for length in lengths])))
    for series, (name, values) in enumerate(drawn):
        figure.add_scatter(
            x=lengths,
            y=values * 1000,
            name=name,
            marker={"size": 9, "symbol": SYMBOLS[series % len(SYMBOLS)]},
            hovertext=[
                f"<b>{name}</b><br>block of {length} tokens: {digits(value * 1000)} ms"
                for length, value in zip(lengths, values, strict=True)
            ],
            hoverinfo="text",
            **line(mode, series % 5),
        )
    figure.update_xaxes(
        title_text="tokens of the block", type="log", tickvals=lengths, ticktext=list(map(str, lengths))
    )
    figure.update_yaxes(title_text="time, ms", rangemode="tozero")
    return figure


def compose_table(report: Report) -> list[dict[str, str]]:
    """One row for each block length and way of making it."""
    result = report.result
    return [
        {
            "block, tokens": str(result.block_length[n]),
            "made": result.names[n],
            "logit cosine": f"{result.cosine[n]:.4f}",
            "KL(full ‖ composed), nats": f"{result.kl[n]:.3g}",
            "top token": "same" if result.same_top[n] else "another",
            "decision": ("same" if result.same_decision[n] else "another") if report.config.answers else "",
            "tokens computed": str(result.computed[n]),
        }
        for n in range(len(result.names))
    ]


def figures(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure | None]:
    """All figures that the report has without asking the reader anything."""
    return [figure(report, mode), compose_times(report, mode)]


def example(engram: str, dense: str) -> ComposeConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.kv.compose import ComposeConfig

    return ComposeConfig((engram,), "In 1963,", brief.PROMPT, " The treaty was signed in", time=False)


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("kl", "cosine", "largest_difference", "timing.seconds")
DEFINITIONS = {
    "cosine": "Cosine of the logits at the suffix's last token with those of the full prefill, whole vocabulary.",
    "kl": "KL(full prefill || composed) in nats over the whole vocabulary.",
    "same_top": "The most likely token is that of the full prefill.",
    "same_decision": "The likeliest of the given answers (their first tokens) is that of the full prefill.",
    "computed": "Tokens that run at the time of the request; a full prefill runs all.",
    "seconds": "Rotating the block's keys, splicing, running K tokens of it and the suffix; both caches are there.",
    "full": "A prefill of prefix, block and suffix from nothing.",
    "continued": "A prefill of block and suffix behind the prefix's cache, which needs no composing at all.",
}
ENTRY = Entry(
    page="kv",
    asks="Can a block that was prefilled alone be moved behind a prefix by rotating its keys?",
    formula=(
        r"k' = R_{p+P}\,R_{p}^{-1}\,k,\qquad"
        r"\mathrm{cosine} = \frac{\langle z_\text{composed},\, z_\text{full}\rangle}"
        r"{\lVert z_\text{composed}\rVert\,\lVert z_\text{full}\rVert}"
    ),
    symbols=(
        ("k,\\ k'", "a cached key, before and after it is moved", ""),
        ("R_p", "the rotation of RoPE for position $p$", ""),
        ("P", "length of the prefix", "tokens"),
        (
            r"z_\text{composed},\ z_\text{full}",
            "logits at the last token, composed and of a full prefill",
            "logits",
        ),
    ),
    sources=(ROPE, NOTES),
    controls="The block not rotated; the block left out; all of its tokens run again, which must be the full "
    "prefill but for rounding.",
    not_shown="quality of a text that is written on: one next token is compared. A cosine near 1 over a whole "
    "vocabulary is common among plausible predictions, so see the decision and the KL beside it.",
    example="--model smollm2-135m --lengths 16 64 --json -",
)
