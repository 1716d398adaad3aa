"""`engram-lab graft`: any causal model with an empty memory, as a folder."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What, how large, where to."""
    parser.add_argument("--base", required=True, help="shipped name, folder or hub id of a model without a memory")
    parser.add_argument(
        "--layer", type=int, action="append", required=True, metavar="N", help="the block before which a memory goes; "
        "may be repeated",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, default=10_000, help="rows of a head, about (default %(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="heads of an order (default %(default)s)")
    parser.add_argument("--max-ngram", type=int, default=3, help="tokens that address a row (default %(default)s)")
    parser.add_argument("--gate", default="demo", help="demo or paper, which scales the score (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the projections and the hash (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")


def run(args: argparse.Namespace) -> int:
    """Put an empty memory onto a model and save it as a folder beside its base."""
    from engram_lab.models.errors import DataError
    from engram_lab.models.grafting import graft, save_graft
    from engram_lab.models.handle import open_model

    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise DataError(f"{args.out} exists already: name a new folder for --out.")
    handle = open_model(args.base, device="cpu")
    made = graft(
        handle, args.layer, rows_per_head=args.rows, heads=args.heads, max_ngram=args.max_ngram, gate=args.gate,
        seed=args.seed,
    )  # fmt: skip
    save_graft(made, args.out)
    layers = ", ".join(map(str, made.engram_layers))
    print(f"{args.out}: an empty memory before layers {layers} of {handle.name}; open it as --model {args.out}")
    return 0
