"""Errata behind a stale cache, on the command line and in exports."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import flags as arguments
from engram_lab.lab.ask import kv_widgets, scenarios, widgets
from engram_lab.lab.fronts.kv_swap import effects_row

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from engram_lab.lab.ask.view import View
    from engram_lab.lab.draw.theme import Mode
    from engram_lab.models.handle import Handle
    from engram_lab.probes.base import Report
    from engram_lab.probes.kv.erratum import ErratumConfig

POLICIES = (0, 4, 3, 2, 1)  # corrections until all is prefilled anew, that the page offers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the errata take."""
    arguments.add_models(parser)
    scenarios.add_scenario(parser)
    parser.add_argument(
        "--chain", action="append", metavar="VALUE=ANSWER", default=[],
        help="a correction of the chain, the last = counts; may be repeated (default: from the scenario)",
    )  # fmt: skip
    parser.add_argument(
        "--corrections", type=int, default=4, help="how many, without --chain; 0 for no chain (default %(default)s)"
    )
    parser.add_argument(
        "--wording",
        default="",
        metavar="TEXT",
        help="of the chain's corrections, with {value} and if you like {before}",
    )
    parser.add_argument(
        "--thresholds", type=int, nargs="+", metavar="N", default=[0, 2, 1],
        help="prefill anew after every N corrections, 0 never, one policy each (default: 0 2 1)",
    )  # fmt: skip
    parser.add_argument("--time", action="store_true", help="measure seconds too")


def config(args: argparse.Namespace) -> ErratumConfig:
    """The request."""
    from engram_lab.models.errors import LabError
    from engram_lab.probes.kv.erratum import ErratumConfig

    pairs = [text.rpartition("=") for text in args.chain]
    if bad := [text for text, (_, sign, _) in zip(args.chain, pairs, strict=True) if not sign]:
        raise LabError(f'"{bad[0]}" is no correction of a chain: give the value, =, and the answer that is due.')
    return ErratumConfig(
        arguments.names(args),
        scenarios.scenario_of(args),
        tuple((value, answer) for value, _, answer in pairs),
        args.corrections,
        args.wording,
        tuple(args.thresholds),
        args.align,
        args.time,
    )


def files(config: ErratumConfig) -> dict[str, str]:
    """None: the command holds the scenario itself."""
    return {}


def options(config: ErratumConfig) -> list[str]:
    """The flags of a request."""
    flags = arguments.model_flags(config.models) + scenarios.scenario_flags(config.scenario, config.align)
    flags += [arguments.flag("chain", f"{value}={answer}") for value, answer in config.chain]
    flags.append(arguments.flag("corrections", config.corrections))
    if config.wording:
        flags.append(arguments.flag("wording", config.wording))
    flags.append(" ".join(["--thresholds", *map(str, config.thresholds)]))
    return [*flags, *(["--time"] if config.time else [])]


def chain_of(text: str) -> tuple[tuple[str, str], ...]:
    """(value, answer) of VALUE=ANSWER;VALUE=ANSWER; LabError for a part without =."""
    from engram_lab.models.errors import LabError

    pairs = [part.rpartition("=") for part in text.split(";") if part.strip()]
    if bad := [value for _, sign, value in pairs if not sign]:
        raise LabError(f'"{bad[0].strip()}" is no correction of a chain: write VALUE=ANSWER, with ; between two.')
    return tuple((value.strip(), answer.strip()) for value, _, answer in pairs)


def view(config: ErratumConfig) -> View:
    """The page of a request."""
    chain = ";".join(f"{value}={answer}" for value, answer in config.chain)
    if chain_of(chain) != config.chain:
        widgets.refuse(f"the chain {chain}, with spaces at an end or a sign that it writes between corrections")
    shown = {
        "corrections": widgets.within("a number of corrections", config.corrections, 0, 20),
        "policies": widgets.some_of("thresholds", config.thresholds, POLICIES),
        "kv_time": config.time,
        "wording": config.wording,
        "chain": chain,
    }
    return kv_widgets.view("Erratum", config, shown, (*kv_widgets.EDITED, *kv_widgets.SAID))


def figure(report: Report, mode: Mode, handles: Sequence[Handle]) -> go.Figure:
    """The answers after each thing said."""
    from engram_lab.lab.fronts.kv_run_figures import errata

    return errata(report, mode)


def rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each thing said behind the prompt, then one for each policy and correction of the chain."""
    from engram_lab.probes.kv.erratum import policy

    result = report.result
    fixed = {"scenario": report.config.scenario.id, "oracle": result.oracle.both}
    nothing: dict[str, Any] = dict.fromkeys(effects_row(result.effects, 0), "")
    for n, name in enumerate(result.variants):
        yield (
            fixed
            | {
                "run": "single", "name": name, "step": 0, "text": result.texts[n],
                "computed_tokens": int(result.computed[n]), "served_tokens": int(result.served[n]),
                "full_tokens": result.full, "prefilled_anew": name == "new prompt",
                "right": bool(result.leader[n] == result.due[n]) if result.due[n] >= 0 else "",
                "margin_logits": "", "prob_due": "", "served_share": "", "prob_third": float(result.prob_third[n]),
            }
            | effects_row(result.effects, n)
        )  # fmt: skip
    if (chain := result.chain) is None:
        return
    for p, threshold in enumerate(chain.thresholds):
        for n, text in enumerate(chain.corrections):
            yield (
                fixed
                | {
                    "run": "chain", "name": policy(threshold), "step": n + 1, "text": text,
                    "computed_tokens": int(chain.computed[p, n]), "served_tokens": int(chain.served[p, n]),
                    "full_tokens": int(chain.full[n]), "prefilled_anew": bool(chain.anew[p, n]),
                    "right": bool(chain.right[p, n]), "margin_logits": float(chain.margin[p, n]),
                    "prob_due": float(chain.prob[p, n]), "served_share": float(chain.share[p, n]), "prob_third": "",
                }
                | nothing
            )  # fmt: skip
