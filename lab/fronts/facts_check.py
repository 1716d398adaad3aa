"""Write facts, then: did the model learn them, what else changed, does undoing give every bit back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import RESAMPLED, Facts, Models, Unrelated, with_layer
from engram_lab.lab.ask.request import Ask
from engram_lab.lab.draw import labels
from engram_lab.lab.draw.figure import bars, list_axis, titled
from engram_lab.lab.draw.tables import interval_of
from engram_lab.lab.draw.theme import PALETTES
from engram_lab.lab.fronts.entry import FACTS, ROME, USER_AS_ENGRAM, WRITING, WRITTEN, Entry

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.facts.check import CheckConfig, CheckResult
    from engram_lab.probes.facts.locality import BitCheck


ASK = Ask("facts check", "facts", (
    Models(),
    Facts(view_name="Write and check", overlay=True),
    Unrelated("texts", key="facts_texts"),
    *RESAMPLED,
))  # fmt: skip
settled = with_layer


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each prompt that was asked: the facts, their paraphrases, neighbours, compositions and aliases."""
    result, facts = report.result, report.config.facts
    for kind in ("facts", "paraphrases", "neighbours", "compositions", "aliases"):
        asked = getattr(result, kind)
        for n, prompt in enumerate(asked.prompts):
            fact = int(asked.fact[n])
            yield {
                "kind": {"facts": "fact", "aliases": "alias"}.get(kind, kind.removesuffix("s")),
                "fact": facts[fact].id or fact,
                "prompt": prompt,
                "answer": asked.answers[n],
                "probability_before": float(asked.probability_before[n]),
                "probability_after": float(asked.probability_after[n]),
                "top1_before": bool(asked.top1_before[n]),
                "top1_after": bool(asked.top1_after[n]),
                "top5_before": bool(asked.top5_before[n]),
                "top5_after": bool(asked.top5_after[n]),
                "said_before": asked.said_before[n],
                "said_after": asked.said_after[n],
                "rival": asked.rival_texts[n],
                "likelier_than_rival_before": _truth(asked.wins_before[n]),
                "likelier_than_rival_after": _truth(asked.wins_after[n]),
                "kl_nats": float(asked.kl[n]),
                "same_bits": bool(asked.same_bits[n]),
                "edited_reads": int(asked.edited_reads[n]),
            }


def _truth(value: Any) -> bool | str:
    return "" if value != value else bool(value)


# What a check is called where it is shown, in the order of the design's list.
CHECKS = {
    "unaddressed": "1 · texts that read no edited row",
    "before": "2 · positions before an edited read",
    "undo table": "6 · the tables after undoing",
    "undo logits": "6 · sentences after undoing everything",
    "undo one fact": "6 · the trigger after undoing its fact",
    "others stay": "6 · another fact's trigger after that",
    "other users": "6 · users beside each other in a batch",
}


def figure(report: Report, mode: Mode = "light", handles: Sequence[Handle] = ()) -> go.Figure:
    """Every score before and after writing, with the interval of what is after."""
    result, palette = report.result, PALETTES[mode]
    scores = [own for own in result.scores if own.n]
    figure = titled(
        mode,
        "What the model says before the facts are written, and after",
        labels.plotly(
            f"{result.name}, layer {result.layer}, {len(report.config.facts)} facts; bars: 95 % intervals over facts"
        ),
        190 + 30 * len(scores),
        margin={"l": 40},
    )  # fmt: skip
    places = list(range(len(scores)))
    hover = [
        f"<b>{own.name}</b>, {own.n} prompts<br>before {interval_of(own, 'before', digits=4)}"
        f"<br>after {interval_of(own, 'after', digits=4)}"
        for own in scores
    ]
    for own, place in zip(scores, places, strict=True):
        line = {"color": palette.line, "width": 3}
        figure.add_scatter(x=[own.before, own.after], y=[place] * 2, mode="lines", line=line, hoverinfo="skip",
                           showlegend=False)  # fmt: skip
    for when, symbol, colour in (("before", "circle-open", palette.quiet), ("after", "circle", palette.series[0])):
        mean, low, high = ([getattr(own, when + end) for own in scores] for end in ("", "_low", "_high"))
        figure.add_scatter(
            x=mean,
            y=places,
            error_x=bars(mean, low, high) if when == "after" else None,
            mode="markers",
            marker={"size": 11, "symbol": symbol, "color": colour},
            name=f"{when} writing",
            hovertext=hover,
            hoverinfo="text",
        )
    figure.update_xaxes(title_text="share of prompts, or mean probability", range=[-0.03, 1.03])
    list_axis(figure, [own.name for own in scores])
    return figure


def locality(report: Report, mode: Mode = "light") -> go.Figure:
    """KL to the model as it was, by distance behind the trigger; what is 0 in every fact has no point."""
    own, palette = report.result.locality, PALETTES[mode]
    at = [n for n in range(len(own.after_n)) if own.after_n[n]]
    figure = titled(
        mode,
        "Behind the trigger the text changes too, by attention and convolution",
        labels.plotly(f"{report.result.name}; mean over facts of KL(before ‖ after), each fact as a sentence with an "
                      "unrelated text behind it"),
        360,
        showlegend=False,
    )  # fmt: skip
    figure.add_scatter(
        x=at,
        y=[float(own.after_kl[n]) if own.after_kl[n] > 0 else None for n in at],
        mode="lines+markers",
        line={"color": palette.series[0], "width": 2.5},
        marker={"size": 8},
        hovertext=[
            f"<b>{n} positions behind</b><br>mean KL {own.after_kl[n]:.6g} nats<br>differs in "
            f"{own.after_differs[n]:.0%} of {int(own.after_n[n])} facts"
            for n in at
        ],
        hoverinfo="text",
    )
    figure.update_xaxes(title_text="positions behind the trigger's last token (0: that token, which says the answer)")
    figure.update_yaxes(title_text="KL(before ‖ after), nats", type="log", dtick=1)
    return figure


def score_table(report: Report) -> list[dict[str, str]]:
    """One row for each score that there are prompts for."""
    return [
        {
            "score": own.name,
            "prompts": str(own.n),
            "before": interval_of(own, "before"),
            "after": interval_of(own, "after"),
        }
        for own in report.result.scores
        if own.n
    ]


def check_table(report: Report) -> list[dict[str, str]]:
    """One row for each comparison of bits."""
    return [
        {
            "check": CHECKS[own.name],
            "verdict": verdict(own),
            "equal": f"{own.equal} of {own.compared} {own.unit}",
            "left out": f"{own.left_out}, of which {own.left_out_equal} are equal: {own.why_left_out}"
            if own.left_out
            else "",
            "exceptions": "; ".join(f"{found.text} ({found.why})" for found in own.exceptions),
        }
        for own in report.result.locality.checks
    ]


def verdict(check: BitCheck) -> str:
    """In two words whether bits are equal."""
    return "bits equal" if check.holds else "nothing to compare" if not check.compared else "bits differ"


def fact_table(report: Report) -> list[dict[str, str]]:
    """One row for each fact: what is said, how sure, the gate, and how it was written."""
    result, asked = report.result, report.result.facts
    return [
        {
            "fact": f"{own.trigger}{own.answer}",
            "learned": "yes" if asked.top1_after[n] else "in the top 5" if asked.top5_after[n] else "no",
            "said before": labels.label(asked.said_before[n].encode()),
            "said after": labels.label(asked.said_after[n].encode()),
            "probability before": f"{asked.probability_before[n]:.4f}",
            "probability after": f"{asked.probability_after[n]:.4f}",
            "gate": f"{result.gate_before[n]:.2f} → {result.gate_after[n]:.2f}",
            "cos with W_V e": f"{result.cos_value[n]:.3f}",
            "cos with the output row": f"{result.cos_output[n]:.3f}",
            "written / residual": f"{result.written_norm[n] / result.residual_norm[n]:.2f}",
        }
        for n, own in enumerate(report.config.facts)
    ]


def asked_table(report: Report, kind: str) -> list[dict[str, str]]:
    """One row for each prompt of a kind: paraphrases, neighbours, compositions or aliases."""
    asked, facts = getattr(report.result, kind), report.config.facts
    return [
        {
            "prompt": prompt,
            "answer": asked.answers[n],
            "of the fact": f"{facts[asked.fact[n]].trigger}{facts[asked.fact[n]].answer}",
            "said before": labels.label(asked.said_before[n].encode()),
            "said after": labels.label(asked.said_after[n].encode()),
            "probability": f"{asked.probability_before[n]:.4f} → {asked.probability_after[n]:.4f}",
            "KL, nats": f"{asked.kl[n]:.3g}",
            "bits": "equal" if asked.same_bits[n] else "differ",
            "edited rows read": str(int(asked.edited_reads[n])),
        }
        for n, prompt in enumerate(asked.prompts)
    ]


def partial_table(report: Report) -> list[dict[str, str]]:
    """One row for each text that reads edited rows without being a trigger, the most first."""
    return [
        {
            "text": own.text,
            "kind": "unrelated" if own.unrelated else "about the facts",
            "edited rows read": str(own.reads),
            "most at one position": str(own.most),
            "by a shared n-gram": str(own.by_ngram),
            "by a collision": str(own.by_collision),
            "positions that differ": str(own.differs),
            "largest KL, nats": f"{own.kl:.3g}",
        }
        for own in sorted(report.result.locality.partial, key=lambda own: (-own.most, -own.reads))
    ]


def addresses_sentence(report: Report) -> str:
    """How many addresses the facts really have, and who shares one."""
    own, facts = report.result.locality, report.config.facts
    said = f"{own.n_facts} facts have {own.n_addresses} distinct addresses"
    groups = [" and ".join(f'"{facts[n].trigger}"' for n in group) for group in own.address_groups]
    return f"{said}; one is shared by {', one by '.join(groups)}." if groups else f"{said}."


def locality_sentence(report: Report) -> str:
    """Where bits are equal, and what changed all the same."""
    result: CheckResult = report.result
    own, checks = result.locality, result.locality.checks
    differ = [CHECKS[check.name] for check in checks if check.compared and not check.holds]
    touched = sum(part.unrelated for part in own.partial)
    kept = f"Bits differ where they must not: {', '.join(differ)}." if differ else "Every comparison of bits holds."
    aliases = result.aliases
    said = (
        f" Of {len(aliases.prompts)} other prompts at the facts' addresses {int(aliases.top1_after.sum())} now say the "
        "fact's answer."
        if aliases.prompts
        else ""
    )
    texts = f" {touched} of {own.n_unrelated} unrelated texts read an edited row." if own.n_unrelated else ""
    return kept + texts + said


def figures(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure | None]:
    """All figures that the report has without asking the reader anything."""
    return [figure(report, mode), locality(report, mode)]


def example(engram: str, dense: str) -> CheckConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.facts.check import CheckConfig

    return CheckConfig((engram,), brief.facts(), brief.writing(), brief.SENTENCES, bootstrap=brief.BOOTSTRAP)


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("facts.probability_after", "facts.top1_after", "paraphrases.probability_after", "gate_after")
DEFINITIONS = FACTS | {
    "unaddressed": "Whole texts that read no edited row: every logit is the same.",
    "before": "Positions of a fact's own sentence before it reads an edited row: the same (causality alone does that).",
    "after": "Positions behind the trigger: expected to change, by attention and convolution; measured, not hidden.",
    "aliases": "Other prompts whose last tokens address the very same rows: they change too.",
    "partial": "Texts that read some edited rows without being a trigger: by an n-gram that a fact has too, or because "
    "another n-gram hashes to the same row.",
    "undo table": "SHA-256 of every table, before anything was applied and after everything was removed.",
    "undo logits": "The facts' sentences after all facts were removed, one after another: every logit as before.",
    "undo one fact": "Each fact removed by itself: its trigger's logits are those from before, where it reads no row "
    "that another fact still has.",
    "others stay": "The same overlays at the trigger of the next fact: as with all facts, where it reads none of the "
    "rows that went.",
    "other users": "A batch of this user, nobody, and another user with other vectors in the same rows, at each "
    "prompt in turn: each as in a batch that is all theirs.",
    "gate": "The gate at the trigger's position; the ceiling is sigmoid(d^(1/4)), or sigmoid(sqrt d), "
    "with norm weights of 1, and as the learned weights allow.",
    "cos_value": "Cosine of what the memory writes at the trigger with W_V e: 1 unless the convolution turns it.",
    "cos_output": "Cosine of it with the gradient of the answer's first logit in the last residual, which is the "
    "answer's row of the head seen through the final norm.",
    "composition": "A prompt whose answer needs the fact and another one.",
    "alias top-1": "How often other prompts at a fact's address say its answer: that they do is no success.",
}
ENTRY = Entry(
    page="facts",
    asks="Can a user's facts be written into single rows, what else changes, and does undoing give every bit back?",
    formula=WRITING
    + r",\qquad\mathrm{KL} = \sum_x p_\text{before}(x)\, \ln \frac{p_\text{before}(x)}{p_\text{after}(x)}",
    symbols=(*WRITTEN, (r"\mathrm{KL}", "how far a prediction changed, where it may", "nats")),
    sources=(USER_AS_ENGRAM, ROME),
    controls="Paraphrases and neighbours; other prompts at the same address; texts that read no edited row, by "
    "equal bits; other users in one batch; undoing, by the tables' SHA-256 and by the logits' bits.",
    not_shown="that nothing else changes: texts that read an edited row do, and anyone who says a trigger gets the "
    "answer. Equal bits before a read are what causality gives any model. Facts about one invented person, worded "
    "by us, are no sample of what users say.",
    example="--model engram-mini --n-texts 20 --json -",
)
