"""`engram-lab train`: text files to a trained Engram, or its dense twin, with what it looked like on the way."""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.command.console import ends_between_steps, set_threads

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Options that are fields of models.train.TrainConfig; their defaults are those of the models that ship.
FIELDS = {
    "tokens": (int, "training tokens"),
    "n_layers": (int, "blocks"),
    "d_model": (int, "width of the residual stream"),
    "n_attention_heads": (int, "attention heads"),
    "d_mlp": (int, "width of the MLP"),
    "context": (int, "longest sequence, used for the last part of the run"),
    "short_context": (int, "length of the sequences before that"),
    "long_share": (float, "share of the steps at the full context"),
    "max_ngram": (int, "largest n-gram order N"),
    "hash_heads": (int, "hash heads per order"),
    "row_width": (int, "width of a table row"),
    "rows_per_head": (int, "rows per head, before the prime search"),
    "gate": (str, "gate variant: paper, demo or v41"),
    "batch_tokens": (int, "tokens a step"),
    "muon_lr": (float, "learning rate of Muon (matrices)"),
    "adam_lr": (float, "learning rate of Adam (embeddings, norms; tables 5 x)"),
    "seed": (int, "seed of the weights and of the document order"),
    "points": (int, "how often held-out loss, KL curve and gates are recorded on the way"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command; model and optimizer options default to the recipe of the shipped models."""
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; data is prepared in OUT/data once")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        help="UTF-8 text, .xz or .gz; a blank line ends a document",
    )
    parser.add_argument("--dataset", help="name (or NAME:CONFIG) of a dataset with a column `text`")
    parser.add_argument("--tokenizer", help="folder or hub id of a tokenizer; otherwise a BPE is trained on the text")
    parser.add_argument("--vocab-size", type=int, default=8192, help="size of the trained BPE (default %(default)s)")
    parser.add_argument("--max-characters", type=int, default=4000, help="cut documents there (default %(default)s)")
    parser.add_argument("--twin", action="store_true", help="train the dense twin: same batches, no memory")
    parser.add_argument("--resume", action="store_true", help="go on from the run's checkpoint")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument(
        "--save-every", type=float, default=300.0, help="seconds between checkpoints (default %(default)s)"
    )
    parser.add_argument("--memory-layers", type=int, nargs="+", help="blocks that get a memory (default 1 6)")
    for name, (kind, text) in FIELDS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)


def mean_kl(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Tensor, positions: Tensor
) -> dict[str, Any]:
    """mean_kl [layer] in nats over ids [batch, pos]: what a recorded point adds to its loss.

    On a copy, so that tracing leaves the model in training alone. Documents are not kept apart here: the curve is
    that of the probe, which runs one text at a time.
    """
    from engram_lab.models.handle import Handle
    from engram_lab.probes.lens_math import lens_statistics

    handle = Handle(copy.deepcopy(model).eval(), tokenizer, "in training")
    try:
        with handle.running():
            states = handle.residuals(ids).states.flatten(1, 2)
            curve = lens_statistics(states, handle.unembed).kl.mean(dim=1)
        return {"layer_names": list(handle.layer_names), "mean_kl": curve.tolist()}
    finally:
        handle.close()


def run(args: argparse.Namespace) -> int:
    """Prepare the text, train, write OUT/engram/final or OUT/dense/final."""
    from tqdm import tqdm
    from transformers.utils import logging

    from engram_lab.models.data import prepare
    from engram_lab.models.errors import DataError
    from engram_lab.models.train import TrainConfig, Trainer

    logging.disable_progress_bar()  # one for every file saved would break up that of the run
    set_threads(args.threads)

    def say(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    chosen = {name: getattr(args, name) for name in FIELDS if getattr(args, name) is not None}
    if args.memory_layers:
        chosen["memory_layers"] = tuple(args.memory_layers)
    config = TrainConfig(twin=args.twin, **chosen)
    data, arm = args.out / "data", args.out / ("dense" if args.twin else "engram")
    if not args.resume and (there := next((arm / n for n in ("final", "checkpoint") if (arm / n).exists()), None)):
        raise DataError(
            f"{there} is of a run that was made before: go on with it by --resume, or name another folder for --out."
        )
    prepare(
        data,
        args.text,
        args.dataset,
        args.tokenizer,
        vocab_size=args.vocab_size,
        max_characters=args.max_characters,
        progress=say,
    )
    trainer = Trainer(config, data, arm, mean_kl)
    if args.resume:
        trainer.resume()
    with tqdm(total=config.steps * config.batch_tokens, unit="tok", unit_scale=True, file=sys.stderr) as bar:
        bar.update(trainer.step * config.batch_tokens)

        def report(line: dict[str, Any]) -> None:
            bar.set_postfix(loss=f"{line['loss']:.3f}", refresh=False)
            bar.update(config.batch_tokens)
            end_here()

        try:
            # Not in the middle of a step: half a step cannot be resumed to the same weights.
            with ends_between_steps() as end_here:
                final = trainer.run(report, save_every=args.save_every)
        except KeyboardInterrupt:
            say(f"Interrupted at step {trainer.step}; go on with the same command and --resume.")
            raise
    say(f"Trained: {final}")
    return 0
