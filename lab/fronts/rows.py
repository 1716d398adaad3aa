"""Rows: what one position reads from the memory, who shares it, and how evenly a text uses it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.flags import read_texts, texts_file
from engram_lab.lab.ask.parts import Models, Prompt, file_of_texts
from engram_lab.lab.ask.request import Ask, File, Flag, Number, flag, refuse
from engram_lab.lab.ask.texts import file_of, held_out
from engram_lab.lab.fronts.entry import ENGRAM, Entry

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.rows import RowsConfig


def our_sentences() -> tuple[str, ...]:
    """All sentences that we wrote, which the page counts over."""
    from engram_lab.lab.fronts.cka import shipped

    return (*held_out(), *(sentence.text for sentence in shipped()))


class Place(Number):
    """What the page always names, and a request may leave to the model."""

    def shown(self, value: int | None) -> int:
        """The number, if it is one."""
        if value is None or value < 0:
            refuse("a position from the end, or for a layer without its number")
        return value


class Counted(Flag):
    """The texts that hits and collisions are counted over."""

    uploads = ("file",)

    def kind(self) -> dict[str, Any]:
        """A file."""
        return {"type": Path, "metavar": "FILE"}

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The texts of the file, or none."""
        return {"text": read_texts(args.text) if args.text else ()}

    def flags(self, config: RowsConfig) -> list[str]:
        """--text, if there are any."""
        return [flag("text", file_of(config.text)[0])] if config.text else []

    def files(self, config: RowsConfig) -> dict[str, str]:
        """The texts as that file."""
        return texts_file(config.text, detail=not config.text)

    def view(self, config: RowsConfig) -> dict[str, Any]:
        """How many of our sentences, or how many of a file."""
        return {"texts": len(config.text)}

    def brought(self, config: RowsConfig) -> dict[str, File]:
        """The texts, unless they are the first of ours."""
        return file_of_texts(config.text, our_sentences())


TOP = Number(
    "top_k", "tokens listed for each row (default %(default)s)", 8, "top", "a number of top tokens", low=1, high=50,
    label="Top tokens", tip="Promoted and suppressed, each.",
)  # fmt: skip
SHARERS = Number(
    "top_shared", "n-grams listed that share a row (default %(default)s)", 10, "sharers", "a number of listed sharers",
    low=0, high=500, label="Listed sharers",
    tip="Of the n-grams that address the same row, the most frequent ones.",
)  # fmt: skip
ASK = Ask("rows", "rows", (
    Models(),
    Prompt("prompt", "the prompt", required=True),
    Place("position", "token of the prompt, negative from the end (default %(default)s)", -1, "pos"),
    Place("layer", "a memory layer (default: the first)", None, "memory"),
    Counted("text", "texts to count hits and collisions over, one a line, or .jsonl"),
    TOP,
    SHARERS,
    Flag("counts", "training hits, from engram-lab rows count (default: what ships)", metavar="FILE"),
))  # fmt: skip


def settled(report: Report) -> RowsConfig:
    """With the position and the layer that were read."""
    from dataclasses import replace

    return replace(report.config, position=report.result.position, layer=report.result.layer)


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """The tokens that what came through promotes and suppresses; without a handle, by the report's own texts."""
    from engram_lab.lab.draw import labels
    from engram_lab.lab.fronts.rows_figures import came_through

    said = report.result.came_through
    texts = dict(zip(said.promoted_ids + said.suppressed_ids, said.promoted_texts + said.suppressed_texts, strict=True))

    def name_of(token_id: int) -> str:
        return labels.label(handles[0].pieces([token_id], whole=False)[0] if handles else texts[token_id].encode())

    return came_through(report, name_of, mode)


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each order and head: what is addressed, who shares it, what it says, how the head is used.

    What was not counted is None; several n-grams or tokens in one cell are apart by " │ ".
    """
    result = report.result
    for row in result.rows:
        found: dict[str, Any] = {
            "layer": result.layer,
            "position": result.position,
            "order": row.order,
            "head": row.head,
            "prime": row.prime,
            "row": row.row,
            "row_id": row.row_id,
            "row_norm": row.norm,
            "gate": result.gate,
            "training_hits": row.training_hits,
            "training_ngrams": row.training_ngrams,
            "text_hits": row.text_hits,
            "text_ngrams": row.text_ngrams,
            "shared_total": row.shared_total,
            "shared": " │ ".join(f"{' '.join(other.canonical_texts)} ({other.count})" for other in row.shared),
            "promoted": " │ ".join(row.says.promoted_texts),
            "suppressed": " │ ".join(row.says.suppressed_texts),
        }
        for name in ("training", "text"):
            usage = getattr(result, name)
            for measure in ("coverage", "collisions", "spread"):
                for end in ("", "_expected", "_sd"):
                    value = None if usage is None else float(getattr(usage, measure + end)[row.order - 2, row.head])
                    found[f"{name}_{measure}{end}"] = value
        yield found


def figures(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure | None]:
    """All figures that the report has without asking the reader anything."""
    from engram_lab.lab.fronts.rows_figures import MEASURES, usage_bars

    counted = [name for name in ("text", "training") if getattr(report.result, name) is not None]
    return [figure(report, mode, handles), *(usage_bars(report, name, MEASURES[0], mode) for name in counted)]


def example(engram: str, dense: str) -> RowsConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.rows import RowsConfig

    return RowsConfig((engram,), (brief.PROMPT,), text=brief.SENTENCES)


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("text.coverage", "training.coverage", "text.load")
DEFINITIONS = {
    "row": "The mix of the canonical ids modulo the head's prime: the row within the head.",
    "hits": "How often a row is read over a text, once for each position whose n-gram addresses it.",
    "shared": "The other distinct n-grams of the brought text that address the same row of the same head.",
    "says": "Logits that a row adds on the direct path with the gate fully open, at the final norm's scale at this "
    "position, less their mean over the vocabulary.",
    "came_through": "The same for the sum of all rows of the position, times its gate, without the convolution.",
    "coverage": "Share of a head's rows that the text's n-grams address.",
    "collisions": "Share of the text's distinct n-grams that share their row of the head with another.",
    "spread": "Variance of the distinct n-grams a row over their mean: 1 if they fall evenly, more if they crowd.",
    "expected": "Mean and standard deviation if each distinct n-gram drew its row evenly and independently.",
}
ENTRY = Entry(
    page="rows",
    asks="Which rows does an n-gram read, who else reads them, and which tokens do they promote?",
    formula=(
        r"r_{n,k} = \Big(\bigoplus_{j<n} x_{t-j}\, m_j\Big) \bmod p_{n,k}, \qquad"
        r"\text{says}(r) = W_U\,\frac{\gamma \odot W_V^{(n,k)}\,r}{\mathrm{rms}(h_\text{final})}, \qquad"
        r"\mathbb{E}[\text{coverage}] = 1-\Big(1-\tfrac1M\Big)^{N}, \quad"
        r"\mathbb{E}[\text{collisions}] = 1-\Big(1-\tfrac1M\Big)^{N-1}"
    ),
    symbols=(
        ("n,\\ k", "order of the n-gram (2, 3, …) and head", ""),
        ("x_t", "canonical id of the token at position $t$", ""),
        ("m_j", "odd multiplier of the layer for the token $j$ before", ""),
        ("p_{n,k}", "rows of a head, a prime", ""),
        ("r", "a row: its number at the left, its vector where it says something", ""),
        (r"W_V^{(n,k)}", "the head's slice of the value matrix", ""),
        (r"\text{says}", "what the row adds to each token's logit, gate fully open", "logits"),
        ("N,\\ M", "distinct n-grams of a text, rows of the head", ""),
    ),
    meaning=r"""
$x$ are canonical ids, $m_j$ the layer's multipliers, $p$ the rows of a head. A row **says** what it adds to the logits
on the direct path, through its slice of $W_V$, the final norm (weight $\gamma$, at its scale at this position) and
$W_U$, with the gate fully open, less the mean over the vocabulary. **What came through** is the sum of all rows times
the gate, without the convolution. What later blocks make of it is not in it. **Hits** count reads, one for each
position whose n-gram addresses the row; **shared with** are the other distinct n-grams of the text that address it.
For $N$ distinct n-grams and $M$ rows, **even hashing** lets each draw a row evenly and independently; the standard
deviations are exact for that. **Spread** is the variance of the n-grams a row over their mean, 1 under even hashing.
All heads of one order share one mix, so their deviations are not independent.
""",
    sources=(ENGRAM,),
    controls="Even hashing, with its standard deviation; the counts over the training text beside yours.",
    not_shown="what the model makes of a row: later blocks, the convolution and the gate of another prompt are not "
    "in what it says. One row is one of many addends. That two n-grams share a row of one head does not mix them "
    "up, as they hardly share those of the other heads.",
    example='--model engram-mini --prompt "The president of the United" --layer 6 --json -',
)
