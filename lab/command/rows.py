"""`engram-lab rows count`: how often each row of a model's memory is read over a text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from engram_lab.lab.command.console import check_outputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands of `engram-lab rows`; each sets `args.call`."""
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=type(parser))
    text = "count the reads of every row over a text, into a safetensors file"
    count = commands.add_parser("count", help=text, description=text)
    count.set_defaults(call=run)
    count.add_argument("--model", required=True, help="shipped name, folder or hub id of a model with a memory")
    source = count.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="UTF-8 text, .xz or .gz; a blank line ends a document"
    )
    source.add_argument(
        "--run", type=Path, metavar="DIR", help="a finished run of engram-lab train: the tokens it was trained on"
    )
    count.add_argument("--tokens", type=int, help="stop after so many tokens (with --run, whole steps)")
    count.add_argument("--out", type=Path, required=True, metavar="FILE", help="the safetensors file to write")


def run(args: argparse.Namespace) -> int:
    """Count, write, and say on stdout what was counted; an interrupt leaves no file behind."""
    from tqdm import tqdm

    from engram_lab.models.data import documents
    from engram_lab.models.errors import DataError
    from engram_lab.models.handle import open_model
    from engram_lab.models.ngrams import packed
    from engram_lab.models.row_counts import TrainingRun, count

    if args.tokens is not None and args.tokens < 1:
        raise DataError(f"--tokens is {args.tokens}; it must be 1 or more.")
    check_outputs(args.out, reads=args.text or ())
    handle = open_model(args.model, device="cpu")
    batches: Any
    if args.run:
        training = TrainingRun.open(args.run, handle)
        batches, sources = training.batches(args.tokens), training.sources
        total = training.tokens if args.tokens is None else min(args.tokens, training.tokens)
    else:
        batches = packed(handle, documents(args.text, None, sys.maxsize), args.tokens)
        sources, total = tuple(path.name for path in args.text), args.tokens
    with tqdm(total=total, unit="tok", unit_scale=True, file=sys.stderr, disable=None) as bar:
        counted = count(handle, batches, sources, lambda tokens: bar.update(tokens - bar.n))
    counted.save(args.out)
    print(f"{args.out}: {counted.tokens} tokens, {' and '.join(map(str, counted.distinct))} distinct n-grams")
    for layer, hits in counted.hits.items():
        print(f"layer {layer}: {(hits > 0).sum()} of {len(hits)} rows read, the most {hits.max()} times")
    return 0
