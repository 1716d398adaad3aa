"""A block's cache moved behind a prefix, on the command line and in exports."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import flags as arguments
from engram_lab.lab.ask import widgets

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.ask.view import View
    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.compose import ComposeConfig

AGAIN = (0, 1, 2, 4, 8, 16, 32)  # tokens of a block that run again, and lengths of it, that the page offers
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What composing takes."""
    arguments.add_models(parser)
    for name, what in (("prefix", "before the block"), ("block", "prefilled alone"), ("suffix", "after it")):
        parser.add_argument(f"--{name}", metavar="TEXT", help=f"the text {what} (default: one of ours)")
    parser.add_argument(
        "--answers", nargs="*", metavar="TEXT", help="decide among these, with their leading space (default: our four)"
    )
    parser.add_argument(
        "--recompute", type=int, nargs="*", metavar="K", default=[0, 2, 8],
        help="first tokens of the block that run again; all is always tried too (default: 0 2 8)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=int, nargs="*", metavar="N", default=[16, 64, 256],
        help="further lengths of the block, repeated or cut (default: 16 64 256)",
    )  # fmt: skip
    parser.add_argument("--time", action="store_true", help="measure seconds too")


def config(args: argparse.Namespace) -> ComposeConfig:
    """The request; the answers of ours go only with our texts."""
    from engram_lab.probes.kv.compose import ANSWERS, BLOCK, PREFIX, SUFFIX, ComposeConfig

    ours = all(getattr(args, name) is None for name in ("prefix", "block", "suffix"))
    answers = args.answers if args.answers is not None else ANSWERS if ours else ()
    return ComposeConfig(
        arguments.names(args),
        PREFIX if args.prefix is None else args.prefix,
        BLOCK if args.block is None else args.block,
        SUFFIX if args.suffix is None else args.suffix,
        tuple(answers),
        tuple(args.recompute),
        tuple(args.lengths),
        args.time,
    )


def files(config: ComposeConfig) -> dict[str, str]:
    """None: the command holds the texts."""
    return {}


def options(config: ComposeConfig) -> list[str]:
    """The flags of a request."""
    import shlex

    from engram_lab.probes.kv.compose import BLOCK, PREFIX, SUFFIX

    flags = arguments.model_flags(config.models)
    for name, ours in (("prefix", PREFIX), ("block", BLOCK), ("suffix", SUFFIX)):
        if (text := getattr(config, name)) != ours:
            flags.append(arguments.flag(name, text))
    flags.append(" ".join(["--answers", *map(shlex.quote, config.answers)]))
    flags.append(" ".join(["--recompute", *map(str, config.recompute)]))
    flags.append(" ".join(["--lengths", *map(str, config.lengths)]))
    return [*flags, *(["--time"] if config.time else [])]


def view(config: ComposeConfig) -> View:
    """The page of a request; it offers no length of half the model's context or more."""
    answers = ";".join(config.answers)
    if tuple(own for own in answers.split(";") if own.strip()) != config.answers:
        widgets.refuse("an answer with ; in it")
    shown = {
        **widgets.models(config.models),
        "experiment": "Compose",
        **{name: getattr(config, name) for name in ("prefix", "block", "suffix")},
        "again": widgets.some_of("numbers of tokens that run again", config.recompute, AGAIN),
        "lengths": widgets.some_of("lengths", config.lengths, LENGTHS),
        "decide": answers,
        "kv_time": config.time,
    }
    return widgets.view("kv", shown)


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """Cosine by tokens that run again."""
    from engram_lab.lab.fronts.kv_run_figures import compose

    return compose(report, mode)


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
