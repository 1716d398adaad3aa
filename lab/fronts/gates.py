"""Gates of a memory: what opens, what is written, what it says and whether it matters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import BOOTSTRAP, SEED, Models, Prompts, of_a_set, of_one_prompt
from engram_lab.lab.ask.request import Ask, Number, Part, Repeated, Switch, Text, refuse
from engram_lab.lab.fronts.entry import ENGRAM, Entry

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.gates import GatesConfig

AS_IT_IS, ALL_LAYERS = "as it is", "all layers"  # of one prompt, in the words of the page


class Unranked(Number):
    """Of a ranking, only what is not as by default is written: one prompt has none."""

    def flags(self, config: GatesConfig) -> list[str]:
        """The flag, if it says something."""
        return super().flags(config) if getattr(config, self.field) != self.default else []


class Controls(Repeated):
    """Controls: several over a text set, one at all layers or at one for a prompt."""

    def view(self, config: GatesConfig) -> dict[str, Any]:
        """A choice of several, or one and its layers."""
        from engram_lab.lab.fronts.gates_figures import CONTROL_NAMES, control_name

        if not config.detail:
            if len(set(config.controls)) < len(config.controls):
                refuse("a control twice")
            return {"controls": [control_name(control) for control in config.controls]}
        if len(config.controls) > 1:
            refuse("several controls at once of one prompt")
        name, _, layer = _only(config)
        at = f"layer {layer}" if layer else ALL_LAYERS
        return {"control": CONTROL_NAMES.get(name, AS_IT_IS), "at": at}


def _only(config: GatesConfig) -> tuple[str, str, str]:
    return (*config.controls, "")[0].partition("@")


class Position(Number):
    """Where knock-outs read the target, which the page names."""

    def view(self, config: GatesConfig) -> dict[str, Any]:
        """The position, where there are knock-outs."""
        if not config.detail or not config.knock_out:
            return Part("position").view(config)
        if config.position is None or config.position < 0:
            refuse("a position from the end")
        return {"pos": config.position}


class ShuffleSeed(Number):
    """The seed, which one prompt needs for a shuffle alone."""

    def view(self, config: GatesConfig) -> dict[str, Any]:
        """The box, where there is one."""
        if not config.detail or _only(config)[0] == "shuffled":
            return super().view(config)
        return Part("seed", default=0).view(config)


TARGET = Text(
    "target", "a text that is one token, whose logit is attributed (default: the next token)", key="target",
    label="Target token",
    tip="May be left empty: then it is the prompt's next token, and behind the prompt the model's own guess. A text "
    "that is one token; most words begin with a space.",
)  # fmt: skip
CONTROLS = Controls(
    "controls", "shuffled, zeroed, one_row or off, at all memory layers or at one; may be repeated", flag="control",
    metavar="NAME[@LAYER]", key="controls", label="Controls",
    tip="Each runs the texts once more with the memory changed.",
)  # fmt: skip
KNOCK_OUTS = Switch(
    "knock_out", "shut each gate up to the position, one at a time", key="knock_out", label="Knock-outs",
    tip="Shut each gate up to the position, one at a time: a forward for every position and layer.",
)  # fmt: skip
MIN_COUNT = Unranked(
    "min_count", "n-grams found less often are not ranked (default %(default)s)", 5, "min_count", "a smallest count",
    low=1, high=1000, label="Smallest count", tip="N-grams found less often are not ranked.",
)  # fmt: skip
SHUFFLE_SEED = ShuffleSeed(**vars(SEED))
ASK = Ask("gates", "gates", (
    Models(),
    Prompts(),
    of_one_prompt(TARGET),
    Position("position", "where --knock-out reads the target, from the end if negative (default: the last)"),
    CONTROLS,
    of_one_prompt(KNOCK_OUTS),
    of_a_set(MIN_COUNT),
    Unranked("ranked", "n-grams at either end (default %(default)s)", 12),
    SHUFFLE_SEED,
    of_a_set(BOOTSTRAP),
))  # fmt: skip


def settled(report: Report) -> GatesConfig:
    """With the position that knock-outs were read at."""
    from dataclasses import replace

    config: GatesConfig = report.config
    return replace(config, position=report.result.position) if config.knock_out else config


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """The gates at each position of one prompt, or their distribution over a text set."""
    from engram_lab.lab.fronts.gates_figures import gate_map, histogram

    if report.config.detail and len(report.config.prompts) == 1:
        return gate_map(report, mode)
    return histogram(report, mode)


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each position, memory layer and branch, intact ("") and with each control that kept its gates.

    `position` counts within its prompt; what was not asked, or is no part of a control's report, is None.
    """
    import numpy as np

    from engram_lab.lab.draw import labels

    result = report.result
    index = result.prompt_index
    position = np.arange(len(index)) - np.searchsorted(index, index)  # prompts follow each other
    said, knocked = result.attribution, result.knock_out

    def number(value: Any) -> float | None:
        return None if value is None or np.isnan(value) else float(value)

    runs = [("", result), *((run.control, run) for run in result.controls if run.gate is not None)]
    for control, run in runs:
        own = run is result
        for pos in range(len(index)):
            start, end = int(result.char_start[pos]), int(result.char_end[pos])
            raw = report.config.prompts[int(index[pos])].encode()[start:end]
            for n, layer in enumerate(result.layers):
                for branch in range(run.gate.shape[1]):
                    yield {
                        "model": result.name,
                        "control": control,
                        "prompt": int(index[pos]),
                        "position": int(position[pos]),
                        "token_id": int(result.token_ids[pos]),
                        "canonical_id": int(result.canonical_ids[pos]),
                        "token": labels.label(raw) if end > start else result.token_texts[pos],
                        "layer": layer,
                        "branch": branch,
                        "gate": float(run.gate[n, branch, pos]),
                        "written_norm": float(run.written_norm[n, branch, pos]),
                        "residual_norm": float(result.residual_norm[n, pos]) if own else None,
                        "next_token_loss_nats": number(run.next_token_loss[pos]),
                        "target_id": int(said.target_ids[pos]) if own and said else None,
                        "target_logit": number(said.logit[pos]) if own and said else None,
                        "written_to_target_logit": number(said.written[n, pos]) if own and said else None,
                        "knock_out_logit_change": number(knocked.logit_change[n, pos]) if own and knocked else None,
                        "knock_out_log_prob_change_nats": (
                            number(knocked.log_prob_change[n, pos]) if own and knocked else None
                        ),
                    }


def figures(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure | None]:
    """All figures that the report has without asking the reader anything."""
    from engram_lab.lab.fronts.gates_figures import GATE, gate_map, offered

    first = figure(report, mode, handles)
    if not (report.config.detail and len(report.config.prompts) == 1):
        return [first]
    maps = [gate_map(report, mode, what) for what in offered(report) if what != GATE]
    for drawn in maps:  # beside two rows there is no room for it, and the subtitle names the unit
        drawn.update_traces(colorbar_title_text="", selector={"type": "heatmap"})
    return [first, *maps]


def example(engram: str, dense: str) -> GatesConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.gates import GatesConfig

    return GatesConfig((engram,), (brief.PROMPT,), controls=("shuffled",), knock_out=True)


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("gate", "gate_mean", "mean_kl", "written_norm", "attribution.memory", "next_token_loss")
DEFINITIONS = {
    "gate": "gate(s), s = <RMSNorm(W_K e), RMSNorm(h)> / sqrt(d): how far the memory opens, 0 to 1.",
    "ceiling": "The largest gate at this width if the norms' weights were 1: |s| <= sqrt(d).",
    "ceiling_learned": "The bound with the norms' own weights: |s| <= sqrt(d) max|w_K w_Q|.",
    "written_norm": "Length of what the memory adds to the residual stream.",
    "residual_norm": "Length of the residual stream that the memory reads and adds to.",
    "attribution": "What each part of the last residual gives the target's logit, the final norm's scale kept.",
    "knock_out": "The target's logit with one gate shut at one position minus as it is; below 0 the memory helped.",
    "rank_correlation": "Spearman's correlation over positions of the gate with the control and without.",
    "shuffled": "Each head reads another row of its own table, by one fixed permutation.",
    "zeroed": "Every row read is zero: the gate goes to its value at s = 0, and nothing is written.",
    "one_row": "Every n-gram reads the first row of its head, as if each table had one row.",
    "off": "The gate is 0 and nothing is written: the same logits as zeroed rows, by construction.",
    "mean_kl": "KL(p_final || p_layer) of the logit lens, of the model as it ran: its own final prediction.",
    "mean": "Means are over all positions of all prompts except a special token that leads a prompt.",
    "interval": "95 % percentile bootstrap over prompts, which are drawn whole; for a change in pairs.",
}
ENTRY = Entry(
    page="gates",
    asks="At which tokens does the memory open, what comes through, and is anything lost without it?",
    formula=(
        r"g = \text{gate}\Big(\frac{\langle \mathrm{RMSNorm}(W_K e),\ \mathrm{RMSNorm}(h)\rangle}{\sqrt d}\Big),"
        r"\qquad\text{written} = g\,W_V e + \mathrm{SiLU}(\mathrm{conv}(\mathrm{RMSNorm}(g\,W_V e))),\qquad"
        r"\text{logit}_v = \sum_\text{parts}"
        r"\frac{\langle \text{part},\ \gamma \odot W_U[v]\rangle}{\mathrm{rms}(h_\text{last})}"
    ),
    symbols=(
        ("g", "the gate of a token at a memory layer", "0 (shut) to 1 (open)"),
        (r"\text{gate}(s)", r"as the checkpoint has it: $\sigma(s)$, or $\sigma(\pm\sqrt{\lvert s\rvert})$", ""),
        ("e", "the rows that the n-grams ending at the token read, one behind the other", ""),
        ("h", "the residual stream there, before the memory adds to it", ""),
        ("d", "its width", ""),
        ("W_K,\\ W_V", "the memory's matrices for keys and values", ""),
        (r"\text{written}", "what the memory adds to the residual stream", "its length is charted"),
        (r"\gamma,\ W_U", "weight of the final norm, output matrix", ""),
        (r"h_\text{last}", "the residual after the last block: the sum of all parts", ""),
    ),
    meaning=r"""
$e$ is what the n-grams that end at a token read, $h$ the residual stream there. With norm weights of 1 no gate can
open further than the **ceiling**, as $|s| \le \sqrt d$; learned weights allow $|s| \le \sqrt d\,\max|w_K w_Q|$.
**Attribution** splits a logit exactly: the final norm divides all parts of the last residual by one number, which is
kept as it was. All tokens share a constant in their logits, so read a share beside the others. A **knock-out** shuts
one gate at one position and layer, for the token itself and for those behind it; what it changes at the chosen
position is shown, each from a forward of its own. It is not the attribution: later layers answer to what is missing.
**Rows shuffled** gives each head another of its own rows, by one permutation drawn with the seed; **rows zeroed** and
**memory off** leave the same model, by construction, and differ in the gate alone (a zero row has a score of 0);
**one row** cuts each head's table to its first. **Rank correlation** is Spearman's, of the gate over positions.
Means are over all positions but a leading special token; 95 % intervals are percentiles of a bootstrap over texts.
""",
    sources=(ENGRAM,),
    controls="Rows shuffled, rows zeroed, tables of one row, memory off, each in all memory layers or in one; "
    "knock-outs beside the attribution.",
    not_shown="that an open gate helps: it opens on wrong rows too. Attribution follows the direct path alone, and "
    "what later blocks make of the memory is not in it. A knock-out shuts one gate at a time, so that two which "
    "stand in for each other both look idle.",
    example='--model engram-mini --prompt "The president of the United" --control off@6 --json -',
)
