"""A user's facts in rows, in LoRA, in the prompt and retrieved, on the command line and in exports."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.ask import facts_widgets, flags

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.ask.view import View
    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.facts.alternatives import AlternativesConfig
    from engram_lab.probes.facts.sets import StatedFact

RANKS, MOST = (8, 64), 20  # of LoRA, that the page offers; facts retrieved there at most
N_TEXTS, BEST = 120, 3  # unrelated texts, facts that are retrieved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the comparison takes."""
    flags.add_models(parser)
    facts_files.add_facts(parser)
    facts_files.add_texts(parser)
    parser.set_defaults(n_texts=N_TEXTS)
    parser.add_argument(
        "--best", type=int, default=BEST, help="facts that are retrieved; 0: none (default %(default)s)"
    )
    parser.add_argument("--rank", type=int, action="append", help="rank of a LoRA; may be repeated (default: 64 and 8)")
    parser.add_argument("--lora-steps", type=int, default=120, help="at most, for LoRA (default %(default)s)")
    parser.add_argument("--lora-rate", type=float, default=3e-3, help="learning rate of LoRA (default %(default)s)")
    parser.add_argument(
        "--lora-stop", type=float, default=0.1, help="mean loss at which LoRA is done, nats (default %(default)s)"
    )
    parser.add_argument("--time", action="store_true", help="say how long writing took; then no two reports are equal")
    flags.add_resampling(parser)


def request(
    models: tuple[str, ...], facts: tuple[StatedFact, ...], unrelated: tuple[str, ...], best: int = BEST, **options: Any
) -> AlternativesConfig:
    """A request with the facts that are retrieved for each of its texts, at most `best`; `options` are its fields."""
    from engram_lab.lab.ask import retrieval
    from engram_lab.models.errors import LabError
    from engram_lab.probes.facts.alternatives import AlternativesConfig, prompts_of

    if best < 0:
        raise LabError(f"The number of facts that are retrieved is {best}; give 0 or more.")
    queries = [*(asked.prompt for _, asked in prompts_of(facts)), *unrelated]
    known = [f"{own.trigger}{own.answer}" for own in facts]
    return AlternativesConfig(models, facts, unrelated, retrieval.best(known, queries, best) if best else (), **options)


def config(args: argparse.Namespace) -> AlternativesConfig:
    """The request."""
    return request(
        flags.names(args),
        facts_files.facts_of(args),
        facts_files.texts_of(args),
        args.best,
        writing=facts_files.writing_of(args),
        ranks=tuple(args.rank or (64, 8)),
        lora_steps=args.lora_steps,
        lora_rate=args.lora_rate,
        lora_stop=args.lora_stop,
        seed=args.seed,
        bootstrap=args.bootstrap,
        time=args.time,
    )


def files(config: AlternativesConfig) -> dict[str, str]:
    """The facts and the texts, where they are not ours."""
    return facts_files.files(config.facts, config.unrelated)


def options(config: AlternativesConfig) -> list[str]:
    """The flags of a request, with the most facts that any of its texts has retrieved."""
    values = {
        "best": max(map(len, config.retrieved), default=0),
        "lora-steps": config.lora_steps,
        "lora-rate": config.lora_rate,
        "lora-stop": config.lora_stop,
        "seed": config.seed,
        "bootstrap": config.bootstrap,
    }
    return [
        *flags.model_flags(config.models),
        *facts_files.flags(config.facts, config.writing),
        *facts_files.text_flags(config.unrelated),
        *(flags.flag("rank", rank) for rank in config.ranks),
        *(flags.flag(name, value) for name, value in values.items()),
        *["--time"] * config.time,
    ]


def settled(report: Report) -> AlternativesConfig:
    """The request with the layer that was written at."""
    made: AlternativesConfig = facts_widgets.settled(report)
    return made


def view(config: AlternativesConfig) -> View:
    """The page of a request, but for its facts."""
    shown = {
        "facts_ranks": [rank for rank in RANKS if rank in config.ranks],
        "facts_best": min(max(map(len, config.retrieved), default=0), MOST),
        **facts_widgets.unrelated("facts_unrelated", config.unrelated),
    }
    return facts_widgets.view("Alternatives", config, shown)


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """Recall, and the change of unrelated text, by method."""
    from engram_lab.lab.fronts.facts_alternatives_figures import comparison

    return comparison(report, mode)


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each method and prompt, then one for each method and unrelated text."""
    result = report.result
    for m, method in enumerate(result.methods):
        for p, prompt in enumerate(result.prompts):
            yield {
                "method": method,
                "kind": result.kinds[int(result.paraphrase[p])],
                "text": prompt,
                "answer": report.config.facts[result.fact_of[p]].answer,
                "probability": float(result.probability[m, p]),
                "rank": int(result.rank[m, p]),
                "tokens": "",
                "change_nats": "",
                "size_nats": "",
                "kl_nats": "",
                "positions": "",
                "positions_changed": "",
            }
        for t, text in enumerate(report.config.unrelated):
            yield {
                "method": method,
                "kind": "unrelated",
                "text": text,
                "answer": "",
                "probability": "",
                "rank": "",
                "tokens": int(result.tokens[t]),
                "change_nats": float(result.text_change[m, t]),
                "size_nats": float(result.text_size[m, t]),
                "kl_nats": float(result.text_kl[m, t]),
                "positions": int(result.positions[t]),
                "positions_changed": int(result.text_changed[m, t]),
            }
