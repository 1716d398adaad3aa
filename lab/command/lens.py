"""`engram-lab lens fit`: fit the tuned lens of a model, with progress, and again from where Ctrl-C stopped it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engram_lab.lab.command.console import Parser, check_outputs, ends_between_steps, set_threads
from engram_lab.lab.draw.durations import digits

if TYPE_CHECKING:
    from engram_lab.models.handle import Handle
    from engram_lab.probes.tuned_lens import FitInfo

EVERY = 3.0  # seconds between lines of progress


def add_arguments(parser: Parser) -> None:
    """The subcommand `fit`."""
    text = "fit a translator for each layer on a text"
    fit = parser.group().add_parser("fit", help=text, description=text)
    add_fit_arguments(fit)


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """What, on which text, how long, where to."""
    parser.add_argument("--model", required=True, help="shipped name, folder, hub id or .gguf file")
    parser.add_argument(
        "--text", type=Path, nargs="+", action="extend", required=True, metavar="FILE",
        help="UTF-8 text, .xz or .gz, best that of the training; a blank line ends a document",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default %(default)s)")
    parser.add_argument("--tokens", type=int, help="tokens of the text to read (default: 512 for each step)")
    parser.add_argument("--max-characters", type=int, default=4000, help="cut documents there (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of documents and positions (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write (default: beside the model, else in the lab's cache)"
    )
    parser.add_argument("--resume", action="store_true", help="go on where Ctrl-C stopped the same command")
    parser.add_argument("--device", help="cpu or cuda (default: the best there is)")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that a checkpoint brings")
    parser.add_argument("--threads", type=int, help="CPU threads")


def destination(handle: Handle, out: Path | None) -> Path:
    """The file to write: in `out`, or where the lens looks. Translators that ship are never written over."""
    from engram_lab.models import listing
    from engram_lab.probes import tuned_lens

    if out is not None:
        return out / tuned_lens.FILE
    cached, *beside = tuned_lens.places(handle)
    for file in beside:
        if listing.SHIPPED not in file.parents and os.access(file.parent, os.W_OK):
            return file
    return cached


def table(info: FitInfo) -> str:
    """Held-out KL of each layer under both lenses, in nats."""
    names = ["embed", *map(str, range(len(info.logit_kl) - 1))]
    rows = [f"{'layer':>8} {'logit lens':>11} {'tuned lens':>11}   (KL to the final prediction, nats)"]
    for name, before, after in zip(names, info.logit_kl, info.tuned_kl, strict=True):
        rows.append(f"{name:>8} {before:11.3f} {after:11.3f}")
    return "\n".join(rows)


def run(args: argparse.Namespace) -> int:
    """Fit, write the translators, and print the held-out KL of each layer before and after."""
    from engram_lab.models.handle import open_model
    from engram_lab.probes import tuned_lens
    from engram_lab.probes.fit_text import read_text

    def say(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    set_threads(args.threads)
    tokens = tuned_lens.tokens_for(args.steps) if args.tokens is None else args.tokens
    config = tuned_lens.FitConfig(args.steps, tokens, args.max_characters, args.seed)
    say("reading the text")
    text = read_text(args.text, config.tokens, config.seed, config.max_characters)
    handle = open_model(args.model, device=args.device, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    path = destination(handle, args.out)
    if path.parent.is_dir():
        check_outputs(path, reads=args.text)
    checkpoint = path.with_suffix(".fit")
    began = told = time.monotonic()

    def report(step: int, losses: list[float]) -> None:
        nonlocal told
        end_here()
        now = time.monotonic()
        if step in (1, config.steps) or now - told >= EVERY:
            told = now
            curve = " ".join(f"{loss:.2f}" for loss in losses)
            say(f"step {step} of {config.steps}, {digits(now - began, 0)} s, KL by layer: {curve}")

    try:
        # Not in the middle of a step: half a step cannot be resumed to the same weights.
        with ends_between_steps() as end_here:
            translators = tuned_lens.fit(handle, text, config, checkpoint, args.resume, report)
    except KeyboardInterrupt:
        say(f"Interrupted: what was fitted is in {checkpoint}; go on with the same command and --resume.")
        raise
    tuned_lens.save(translators, path)
    checkpoint.unlink(missing_ok=True)
    info = translators.info
    say(f"Fitted on {info.tokens} tokens of {', '.join(info.texts)}, written to {path}")
    print(f"On {info.held_out_positions} positions of held-out documents:\n{table(info)}")
    return 0
