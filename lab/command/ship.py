"""`engram-lab ship`: a finished training run to the three folders that go with the lab, each with its card.

The third model is the Engram on the way, at the recorded point whose held-out loss is nearest to the twin's final
one: with it the two architectures can be compared at equal loss as well as at equal tokens.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the destination, and what the card says of the text, which the run itself cannot know."""
    parser.add_argument("--run", type=Path, required=True, help="folder given to `engram-lab train --out`")
    parser.add_argument("--to", type=Path, required=True, help="folder for the models, such as assets/models")
    parser.add_argument("--about-data", required=True, help="what the text is and its licence, for the card")
    parser.add_argument("--licence", default="not stated", help="of the weights, for the card (default: %(default)s)")
    parser.add_argument("--limit", action="append", default=[], help="what the models cannot do, for the card; repeat")


def run(args: argparse.Namespace) -> int:
    """Copy, measure the early checkpoint on the whole held-out split, write card.json into each folder."""
    from engram_lab.models.errors import CheckpointError
    from engram_lab.models.train import replaced_folder

    try:
        engram, dense = (
            json.loads((args.run / arm / "final" / "training.json").read_text()) for arm in ("engram", "dense")
        )
        info = json.loads((args.run / "data" / "data.json").read_text())
    except OSError as error:
        raise CheckpointError(f"{args.run} is not a finished run of both models ({error}).") from None
    target = dense["points"][-1]["held_out_loss"]
    early = min(engram["points"], key=lambda point: abs(point["held_out_loss"] - target))
    sources = {
        "engram-mini": (args.run / "engram" / "final", engram),
        "engram-mini-early": (
            args.run / "engram" / "points" / f"step-{early['step']:06d}",
            shortened(engram, early, args.run),
        ),
        "dense-mini": (args.run / "dense" / "final", dense),
    }
    for name in sources:
        _check_folder(args.to / name, name)
    losses = {name: card["held_out_loss"] for name, (_, card) in sources.items()}
    for name, (source, training) in sources.items():
        card = describe(name, training, info, args, losses)
        with replaced_folder(args.to / name) as folder:
            shutil.copytree(source, folder, dirs_exist_ok=True)
            (folder / "training.json").write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")
            (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
            for file in folder.iterdir():
                file.chmod(0o644)
    return 0


def _check_folder(folder: Path, name: str) -> None:
    """DataError, before any work, where the folder of a model holds what no run shipped there."""
    from engram_lab.models.errors import DataError

    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        shipped = json.loads((folder / "card.json").read_text(encoding="utf-8"))["name"] == name
    except (OSError, ValueError, KeyError, TypeError):
        shipped = False
    if not shipped:
        raise DataError(f"{folder} holds something else than a shipped {name}: name another folder for --to.")


def shortened(training: dict[str, Any], point: dict[str, Any], run: Path) -> dict[str, Any]:
    """training.json of a point on the way, with its loss on the whole held-out split."""
    import torch
    from transformers import AutoModelForCausalLM

    from engram_lab.models.data import PackedStream
    from engram_lab.models.train import held_out_loss

    folder = run / "engram" / "points" / f"step-{point['step']:06d}"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stream = PackedStream(run / "data", "held_out", None)
    loss, tokens = held_out_loss(model, stream, training["config"]["context"], stream.total)
    return {
        **training,
        "steps": point["step"],
        "tokens": point["tokens"],
        "seconds": None,
        "held_out_loss": loss,
        "held_out_tokens": tokens,
        "points": [p for p in training["points"] if p["step"] <= point["step"]],
    }


def command_of(config: dict[str, Any], info: dict[str, Any]) -> str:
    """The command that trains so, with every setting that is not the default."""
    from engram_lab.lab.command.train import FIELDS
    from engram_lab.models.train import TrainConfig

    default, words = vars(TrainConfig()), ["engram-lab train --out RUN --text TEXT"]
    words += ["--twin"] if config["twin"] else []
    for name in FIELDS:
        if config[name] != default[name]:
            words.append(f"--{name.replace('_', '-')} {config[name]}")
    if not config["twin"] and tuple(config["memory_layers"]) != default["memory_layers"]:
        words.append(f"--memory-layers {' '.join(map(str, config['memory_layers']))}")
    words += [f"--max-characters {info['max_characters']}", f"--vocab-size {info['vocab_size']}"]
    return " ".join(words)


def limits_of(training: dict[str, Any], said: list[str]) -> list[str]:
    """What follows from the run itself, and what its maker says."""
    config = training["config"]
    short, long = config["short_context"], config["context"]
    lengths = f"{short} tokens, for the last part of {long}" if short != long else f"{long} tokens"
    return [
        f"It has read {training['tokens']:,} tokens of the text named here, and knows nothing else.",
        f"It was trained on sequences of {lengths}; longer ones are refused.",
        *said,
    ]


def describe(
    name: str, training: dict[str, Any], info: dict[str, Any], args: argparse.Namespace, losses: dict[str, float]
) -> dict[str, Any]:
    """The model card: what it is, how it was made, what it measures, what it cannot do."""
    config = training["config"]
    rows = len(config["memory_layers"]) * (config["max_ngram"] - 1) * config["hash_heads"]
    all_parameters, tables = training["parameters"]["all"], training["parameters"]["tables"]
    return {
        "name": name,
        "command": command_of(config, info),
        "data": args.about_data,
        "documents": info["documents"],
        "tokens": training["tokens"],
        "steps": training["steps"],
        "parameters": {
            "all": all_parameters,
            "table": tables,
            # Of the tables a token touches only the rows it addresses.
            "active_per_token": all_parameters - tables + (0 if config["twin"] else rows * config["row_width"]),
        },
        "held_out_loss_nats": training["held_out_loss"],
        "held_out_tokens": training["held_out_tokens"],
        "held_out_loss_nats_of_all": losses,
        "precision": "weights stored in bfloat16; the losses are those of the stored weights run in float32",
        "licence": args.licence,
        "limits": limits_of(training, args.limit),
    }
