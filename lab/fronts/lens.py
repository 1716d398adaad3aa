"""Logit lens and tuned lens: what each layer would predict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import RESAMPLING, Models, Prompts, of_a_set, of_one_prompt
from engram_lab.lab.ask.request import Ask, Number, Switch, Text
from engram_lab.lab.fronts.entry import ENGRAM, LOGIT_LENS, TUNED_LENS, Entry

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.lens import LensConfig

TARGET = Text(
    "target", "a text that is one token, whose rank and probability are reported", key="target", label="Target token",
    tip="May be left empty. A text that is one token; most words begin with a space. Its rank and probability are then "
    "followed through the layers.",
)  # fmt: skip
TOP = Number(
    "top_k", "tokens listed for each cell (default %(default)s)", 5, "top", "a number of top tokens", low=1, high=20,
    label="Top tokens", tip="How many are listed for a cell.",
)  # fmt: skip
TUNED = Switch(
    "tuned", "the tuned lens too; see engram-lab lens fit", key="tuned", label="Tuned lens",
    tip="Beside the logit lens, in dotted lines with open marks.",
)  # fmt: skip
ASK = Ask("lens", "lens", (
    Models(against="optional"), Prompts(), of_one_prompt(TARGET), of_one_prompt(TOP, always=False), TUNED,
    *map(of_a_set, RESAMPLING),
))  # fmt: skip


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """The mean KL by layer."""
    from engram_lab.lab.fronts.lens_figures import lens_curves

    return lens_curves(report, mode, {handle.name: handle.engram_layers for handle in handles})


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each model, position and layer; what was not asked is None.

    `position` counts within its prompt; `token` is the visible label, `prompt` the index into config.prompts; the
    columns of the tuned lens are there if it was asked for.
    """
    import numpy as np

    from engram_lab.lab.draw import labels
    from engram_lab.lab.fronts.lens_figures import readings

    for lens in report.result.models:
        index = lens.prompt_index
        position = np.arange(len(index)) - np.searchsorted(index, index)  # prompts follow each other
        losses = lens.next_token_loss
        for pos in range(len(index)):
            start, end = int(lens.char_start[pos]), int(lens.char_end[pos])
            raw = report.config.prompts[int(index[pos])].encode()[start:end]
            token = labels.label(raw) if end > start else lens.token_texts[pos]
            for layer, name in enumerate(lens.layer_names):
                row = {
                    "model": lens.name,
                    "prompt": int(index[pos]),
                    "position": int(position[pos]),
                    "token_id": int(lens.token_ids[pos]),
                    "token": token,
                    "layer": name,
                    "target_id": lens.target_id,
                    "next_token_loss_nats": None if np.isnan(losses[pos]) else float(losses[pos]),
                }
                for reading, tuned in readings(lens):
                    ids, probs = reading.top_ids, reading.top_probs
                    rank, prob = reading.target_rank, reading.target_prob
                    values = {
                        "kl_nats": float(reading.kl[layer][pos]),
                        "entropy_nats": float(reading.entropy[layer][pos]),
                        "top_id": None if ids is None else int(ids[layer][pos][0]),
                        "top_probability": None if probs is None else float(probs[layer][pos][0]),
                        "target_rank": None if rank is None else int(rank[layer][pos]),
                        "target_probability": None if prob is None else float(prob[layer][pos]),
                        "settle_layer": lens.layer_names[int(reading.settle_depth[pos])],
                    }
                    row |= {f"tuned_{key}": value for key, value in values.items()} if tuned else values
                yield row


def figures(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure | None]:
    """All figures that the report has without asking the reader anything."""
    from engram_lab.lab.draw.figure import namer
    from engram_lab.lab.fronts.lens_figures import difference_curve, lens_map, readings, settle_histogram

    models, difference, drawn = report.result.models, report.result.difference, [figure(report, mode, handles)]
    if difference is not None and difference.mean_kl is not None:
        drawn.append(difference_curve(report, mode))
    if report.config.detail and len(report.config.prompts) == 1:
        for n, lens in enumerate(models):
            for _, tuned in readings(lens):
                drawn.append(lens_map(report, n, namer(lens.name, handles), mode, tuned=tuned))
    return [*drawn, settle_histogram(report, mode)]


def example(engram: str, dense: str) -> LensConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.lens import LensConfig

    return LensConfig((engram, dense), (brief.PROMPT,), " States")


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("models.mean_kl", "models.kl", "models.tuned.mean_kl", "models.tuned.kl", "models.next_token_loss")
DEFINITIONS = {
    "kl": "KL(p_final || p_layer) in nats: float32 softmax of the residual after final norm and head.",
    "entropy": "Entropy of the layer's prediction, in nats.",
    "top_ids": "The tokens with the largest logits, equals by rising id.",
    "target_rank": "How many tokens have a larger logit than the target; 0 is top.",
    "settle_depth": "The first layer from which the most likely token stays the final one.",
    "tuned": "The same figures of the residual h after its layer's translator, h + A h + b, fitted on other text.",
    "mean_final_entropy": "Mean entropy of the model's own prediction: KL is relative to it.",
    "next_token_loss": "Cross-entropy of the model's own prediction with the prompt's next token, in nats.",
    "mean": "Means are over all positions of all prompts except a special token that leads a prompt.",
    "interval": "95 % percentile bootstrap over prompts, which are drawn whole; for two models in pairs.",
}
ENTRY = Entry(
    page="lens",
    asks="What would each layer predict if it were the last, and from which layer on does the prediction stand?",
    formula=(
        r"\mathrm{KL}(p_\text{final} \,\|\, p_\text{layer}) = \sum_{v} p_\text{final}(v)\,"
        r"\ln\frac{p_\text{final}(v)}{p_\text{layer}(v)}\ \text{nats},"
        r"\qquad p_\text{layer} = \mathrm{softmax}\big(W_U\,\mathrm{norm}(h_\text{layer})\big)"
        r"\ \text{or, tuned,}\ \mathrm{softmax}\big(W_U\,\mathrm{norm}"
        r"(h_\text{layer} + A_\text{layer} h_\text{layer} + b_\text{layer})\big)"
    ),
    symbols=(
        (r"h_\text{layer}", "the residual stream after a block; `embed` is before block 0", ""),
        (r"\mathrm{norm},\ W_U", "the model's own final norm and output matrix", ""),
        (r"p_\text{layer}", "the distribution of the next token, read at a layer, in float32", "probability"),
        (r"p_\text{final}", "the model's own: that of the last layer", "probability"),
        (r"A_\text{layer},\ b_\text{layer}", "the translator of the tuned lens, fitted for each layer", ""),
        ("v", "a token of the vocabulary", ""),
    ),
    meaning=r"""
$h_\text{layer}$ is the residual stream after the block (`embed`: before block 0), read through the model's own final
norm and output matrix $W_U$, in float32. The last layer is the model's own prediction, so its KL is exactly 0.
The **tuned lens** ([Belrose et al.](https://arxiv.org/abs/2303.08112)) puts an affine translator before that, one for
each layer but the last: it starts at zero and is fitted to the least KL on other text (`engram-lab lens fit`). Where
the logit lens is far off and the tuned lens near, the layer held the prediction in a basis of its own. KL is relative
to the final prediction, so models of different **final entropy** are compared with care.
**Entropy** is that of $p_\text{layer}$. **Settle depth** is the first layer from which on the top token stays the
final one, counted from embed = 0. **Rank** counts the tokens with a larger logit, so 0 is the top. Means are over all
positions but a leading special token, which stands for no text. 95 % intervals are percentiles of a bootstrap over
texts, drawn whole; for a difference in pairs.
""",
    sources=(LOGIT_LENS, TUNED_LENS, ENGRAM),
    controls="The last layer, whose logits are bit for bit the model's; the tuned lens, which tells a basis of its "
    "own from a prediction that is not there yet; a twin at equal tokens, and one at equal held-out loss.",
    not_shown="that later blocks use what a layer holds: a lens reads, it does not intervene. A small KL means "
    "near to this model's own prediction, right or wrong. The raw lens reads each layer in the basis of the last "
    "one, so that a lower curve need not be a deeper layer; a tuned lens may find what the model "
    "itself does not use.",
    example='--model engram-mini --against dense-mini --tuned --prompt "The capital of the United" --json -',
)
