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

LIMITS = [
    "It has read about ten million tokens: its text is grammatical at best, and its facts are mostly wrong.",
    "It knows English encyclopedia prose only: no dialogue, no code, hardly any other language.",
    "It was trained on sequences of 256 tokens, for the last part of 512; longer ones are refused.",
    "It shows mechanisms of a memory at a small scale; it says nothing about the quality of large models.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the destination, and what the card says of the text, which the run itself cannot know."""
    parser.add_argument("--run", type=Path, required=True, help="folder given to `engram-lab train --out`")
    parser.add_argument("--to", type=Path, required=True, help="folder for the models, such as assets/models")
    parser.add_argument("--about-data", required=True, help="what the text is and its licence, for the card")


def run(args: argparse.Namespace) -> int:
    """Copy, measure the early checkpoint on the whole held-out split, write card.json into each folder."""
    from engram_lab.models.errors import CheckpointError

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
    losses = {name: card["held_out_loss"] for name, (_, card) in sources.items()}
    for name, (source, training) in sources.items():
        folder = args.to / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        for file in folder.iterdir():
            file.chmod(0o644)
        (folder / "training.json").write_text(json.dumps(training, indent=1) + "\n")
        card = describe(name, training, info, args.about_data, losses)
        (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    return 0


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


def describe(
    name: str, training: dict[str, Any], info: dict[str, Any], about_data: str, losses: dict[str, float]
) -> dict[str, Any]:
    """The model card: what it is, how it was made, what it measures, what it cannot do."""
    config = training["config"]
    rows = len(config["memory_layers"]) * (config["max_ngram"] - 1) * config["hash_heads"]
    all_parameters, tables = training["parameters"]["all"], training["parameters"]["tables"]
    command = "engram-lab train --out RUN --text TEXT" + (" --twin" if config["twin"] else "")
    return {
        "name": name,
        "command": f"{command} --max-characters {info['max_characters']} --vocab-size {info['vocab_size']}",
        "data": about_data,
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
        "licence": "Apache-2.0",
        "limits": LIMITS,
    }
