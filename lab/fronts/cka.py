"""CKA: which layer of one model looks like which layer of another."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import brief
from engram_lab.lab.ask.parts import NOTHING, RESAMPLING, Models
from engram_lab.lab.ask.request import Ask, File, Part, flag, refuse, word_of
from engram_lab.lab.fronts.entry import CKA, ENGRAM, HSIC, UNBIASED, Entry
from engram_lab.models.errors import LabError

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.cka import CKAConfig
    from engram_lab.probes.points import Sentence

ENTITIES = "entities.bio"  # the sentences that ship
# The kinds of points of probes.points, in the words of the page
KINDS = {"ends of entities": "entity", "all tokens": "all", "ends of texts": "last"}
ENDS = ("", "_low", "_high")
FILE, FILE_B = "sentences.jsonl", "sentences_b.jsonl"  # where an exported command reads its own


def shipped() -> tuple[Sentence, ...]:
    """The sentences with entities that we wrote."""
    from engram_lab.lab.ask.texts import TEXTS
    from engram_lab.probes.points import read_sentences

    return read_sentences((TEXTS / ENTITIES).read_bytes(), ENTITIES)


def to_file(texts: Sequence[str], entities: Sequence[Sequence[Sequence[int]]] | None) -> bytes:
    """Sentences as a file that the page reads."""
    from engram_lab.probes.points import to_json_lines

    return to_json_lines(texts, entities).encode()


def _ships(config: CKAConfig) -> bool:
    """Whether the request is about the sentences that ship, the first so many."""
    from engram_lab.probes.points import take

    return (
        config.prompts_b is None
        and (config.prompts, config.entities) == take(shipped(), config.points, len(config.prompts))
    )  # fmt: skip


class Pair(Models):
    """Two models, or one beside itself."""

    def view(self, config: CKAConfig) -> dict[str, Any]:
        """The sidebar, and the switch for itself."""
        itself = config.models[0] == config.models[1]
        names = {"model": config.models[0], "against": NOTHING if itself else config.models[1]}
        return names | {"itself": itself}


class Sentences(Part):
    """The sentences, the positions in them that are compared, and other texts for the second model."""

    uploads = ("cka_file", "cka_file_b")

    def add(self, parser: argparse.ArgumentParser) -> None:
        """--entities or --prompts, --prompts-b, --points and --max-sentences."""
        given = parser.add_mutually_exclusive_group()
        given.add_argument(
            "--entities",
            type=Path,
            metavar="FILE",
            help="sentences with entities: BIO/CoNLL, or .jsonl with text and entities; .xz and .gz too "
            "(default: the sentences that ship)",
        )
        given.add_argument("--prompts", type=Path, metavar="FILE", help="a text set: UTF-8, one text a line, or .jsonl")
        parser.add_argument(
            "--prompts-b", type=Path, metavar="FILE", help="other texts for --against, as many; compared at their ends"
        )
        parser.add_argument(
            "--points",
            choices=["entity", "all", "last"],
            help="positions compared: last tokens of entities, all, or the last of each text (default: entity where "
            "there are entities, last with --prompts-b, else all)",
        )
        parser.add_argument("--max-sentences", type=int, metavar="N", help="only the first N that have such points")

    def read(self, args: argparse.Namespace) -> dict[str, Any]:
        """The sentences that have such points, the first so many."""
        from engram_lab.probes.points import ALL, ENTITY, LAST, read_sentences, take

        if args.max_sentences is not None and args.max_sentences < 1:
            raise LabError(f"--max-sentences is {args.max_sentences}; it must be 1 or more.")
        path = args.entities or args.prompts
        sentences = shipped() if path is None else read_sentences(path.read_bytes(), str(path))
        other = None if args.prompts_b is None else read_sentences(args.prompts_b.read_bytes(), str(args.prompts_b))
        if args.points is not None:
            points = args.points
        elif other is not None:
            points = LAST
        else:
            points = ENTITY if args.entities or any(s.entities for s in sentences) else ALL
        texts, entities = take(sentences, points, args.max_sentences)
        if not texts:
            raise LabError(f"{path} marks no entity: mark some, or choose --points=all or --points=last.")
        prompts_b = None if other is None else take(other, points, args.max_sentences)[0]
        return {"prompts": texts, "entities": entities, "points": points, "prompts_b": prompts_b}

    def flags(self, config: CKAConfig) -> list[str]:
        """--points, the number of those that ship or a file, and --prompts-b."""
        flags = [flag("points", config.points)]
        if _ships(config):
            flags.append(flag("max-sentences", len(config.prompts)))
        else:
            flags.append(flag("prompts" if config.entities is None else "entities", FILE))
        return flags if config.prompts_b is None else [*flags, flag("prompts-b", FILE_B)]

    def files(self, config: CKAConfig) -> dict[str, str]:
        """The sentences, unless they are those that ship."""
        from engram_lab.probes.points import to_json_lines

        if _ships(config):
            return {}
        found = {FILE: to_json_lines(config.prompts, config.entities)}
        return found if config.prompts_b is None else found | {FILE_B: to_json_lines(config.prompts_b, None)}

    def view(self, config: CKAConfig) -> dict[str, Any]:
        """How many, and which positions."""
        return {"sentences": len(config.prompts), "points": word_of("the points", config.points, KINDS)}

    def brought(self, config: CKAConfig) -> dict[str, File]:
        """The sentences, unless they are the first that ship, and the other texts."""
        from engram_lab.probes.points import read_sentences, take

        brought = {}
        if (config.prompts, config.entities) != take(shipped(), config.points, len(config.prompts)):
            raw = to_file(config.prompts, config.entities)
            if take(read_sentences(raw, FILE), config.points) != (config.prompts, config.entities):
                refuse("a sentence without an entity, or one that no file holds")
            brought["cka_file"] = (FILE, raw)
        if config.prompts_b is not None:
            brought["cka_file_b"] = (FILE_B, to_file(config.prompts_b, None))
        return brought


ASK = Ask("cka", "cka", (Pair(against="required"), Sentences("prompts"), *RESAMPLING))


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """The map of all pairs of layers with its ridge."""
    from engram_lab.lab.fronts.cka_figures import cka_map

    return cka_map(report, mode)


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each pair of layers; what is of a layer of A alone stands in each of its rows."""
    from engram_lab.probes.cka import names_of

    result = report.result
    name_a, name_b = names_of(report.config)

    def number(field: str, *at: int) -> float | None:
        """An entry of an array that may be missing, and that may hold NaN."""
        values = getattr(result, field)
        return None if values is None or values[at] != values[at] else float(values[at])

    for i, layer_a in enumerate(result.layers_a):
        for j, layer_b in enumerate(result.layers_b):
            yield {
                "model_a": name_a,
                "layer_a": layer_a,
                "model_b": name_b,
                "layer_b": layer_b,
                **{field: number(field, i, j) for field in ("cka", "cka_low", "cka_high")},
                "cka_biased": number("biased", i, j),
                **{field + end: number(field + end, i) for field in ("alignment_a", "lead") for end in ENDS},
                "points": result.n_points,
                "sentences": result.n_sentences,
                "massive_a": number("massive_a", i),
                "massive_b": number("massive_b", j),
            }


def figures(report: Report, mode: Mode, handles: Sequence[Handle]) -> list[go.Figure | None]:
    """All figures that the report has without asking the reader anything."""
    from engram_lab.lab.fronts.cka_figures import alignment_curve, lead_curve

    lead = None if report.result.lead is None else lead_curve(report, mode)
    return [figure(report, mode, handles), alignment_curve(report, mode), lead]


def example(engram: str, dense: str) -> CKAConfig:
    """A short request that shows most of what the probe computes."""
    from engram_lab.probes.cka import CKAConfig

    return CKAConfig((engram, dense), brief.SENTENCES, points="all", bootstrap=brief.BOOTSTRAP)


# The measures whose difference between two runs is shown first: paths of the result without indices
COMPARED = ("cka", "alignment_a", "lead", "biased")
DEFINITIONS = {
    "cka": "Linear CKA with the unbiased HSIC of Song et al. (2012) over all points; near 0 it can be negative.",
    "biased": "Linear CKA with the biased HSIC, as much of the literature has it: too high for few points.",
    "alignment": "CKA-weighted mean of the block numbers of the other model's 5 most similar layers (embed is -1); a "
    "negative CKA has weight 0.",
    "n_first": "Points left out because they are a model's first position, where no special token leads: it attends to "
    "itself alone, and models park attention there in a state that may be a hundred times as long as the others.",
    "massive": "Length of the longest state of a layer at a point, over the median one. Above 10, one point may decide "
    "the CKA of the layer.",
    "lead": "Half of (alignment of A's layer in B, minus alignment of B's same layer in A): how many blocks deeper A's "
    "layer looks. The pull of the mean of 5 towards the middle is in both and cancels.",
    "interval": "95 % percentiles over resamples of the sentences, drawn whole and with replacement; each HSIC follows "
    "the sentences' shares in it (first order), as copies of a sentence must not be paired with each other. Equal "
    "sentences are one; fewer than six different ones have no interval.",
}
ENTRY = Entry(
    page="cka",
    asks="Which layer of one model looks like which layer of another, and is one of them deeper for it?",
    formula=(
        r"\mathrm{CKA}(X, Y) = \frac{\mathrm{HSIC}_1(X, Y)}{\sqrt{\mathrm{HSIC}_1(X, X)\,\mathrm{HSIC}_1(Y, Y)}},"
        r"\qquad n(n-3)\,\mathrm{HSIC}_1 = \lVert X^\top Y\rVert_F^2 - \frac{n}{n-2}\sum_i |x_i|^2 |y_i|^2"
        r" + \frac{\sum_i |x_i|^2\,\sum_i |y_i|^2}{(n-1)(n-2)}"
    ),
    symbols=(
        ("X,\\ Y", "residual streams of a layer of either model at the same points, centred", ""),
        ("x_i,\\ y_i", "their rows: one point", ""),
        ("n", "points", ""),
        (
            r"\mathrm{HSIC}_1",
            "the unbiased estimator of how far similar points in one are similar in the other",
            "",
        ),
        (r"\mathrm{CKA}", "similarity", "1 at most, 0 for unrelated, a little below by chance"),
    ),
    meaning=r"""
$X$ and $Y$ are the residual streams of a layer of either model at the same $n$ points, centred; HSIC$_1$ is the
unbiased estimator of Song et al. (2012), so unrelated layers score 0 whatever their width, and a little below it by
chance. The **biased** value, $\lVert X^\top Y\rVert_F^2 / (\lVert X^\top X\rVert_F \lVert Y^\top Y\rVert_F)$, is what
much of the literature prints; it is too high for few points. **Soft alignment** of a layer is the CKA-weighted mean of
the block numbers of its 5 most similar layers in the other model (`embed` is -1); a negative CKA has no weight there.
A mean of 5 is pulled towards the middle at either end, also for a model with itself. **Lead** is half of A's layer in B
minus B's same layer in A, in which that pull cancels. 95 % intervals are percentiles over resamples of the sentences,
drawn whole and with replacement; each HSIC follows the sentences' shares in it, to first order, because an unbiased
estimator must not pair a sentence with its own copy; equal sentences count as one, and fewer than six different ones
have no interval. Positions are matched by the text in front of them. A model's **first position** is left out where no
special token leads (Qwen, GPT-2, SmolLM2): it can only attend to itself, models park attention there, and its state, a
hundred times as long as the others, would decide every figure.
""",
    sources=(CKA, HSIC, UNBIASED, ENGRAM),
    controls="A model with itself, which shows how far a mean of 5 is pulled to the middle; the biased values; "
    "intervals over sentences; the logit lens of the same pair on the same sentences, beside it.",
    not_shown="that two layers compute the same: it is blind to rotation and scale, and the few directions in "
    "which points differ most decide it. It compares, and says nothing of cause. Depth that is read off it is a "
    "likeness between two models on one set of points.",
    example="--model engram-mini --against dense-mini --max-sentences 100 --json -",
)
