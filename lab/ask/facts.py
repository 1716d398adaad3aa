"""The facts that ship, and a user's own: on the command line, in a table and in files; light imports."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_lab.lab.ask import flags as arguments
from engram_lab.lab.ask.texts import file_of, held_out, lines_of
from engram_lab.models.files import load_json

if TYPE_CHECKING:
    from engram_lab.probes.facts.sets import StatedFact, Writing

PERSONA = Path(__file__).resolve().parents[2] / "assets" / "facts" / "persona.jsonl"
USER = "maya"  # whose facts those are
FILE = "facts.jsonl"  # where an exported command reads facts that do not ship
N_TEXTS = 40  # unrelated texts by default
SETTINGS = {"steps": int, "rate": float, "pull": float}  # of a writing, kept in its overlay where not as by default
_TEXTS = ("id", "trigger", "answer")
_KEYS = (*_TEXTS, "paraphrases", "neighbours", "composition")


@cache
def persona() -> tuple[StatedFact, ...]:
    """The fifty facts that we wrote about Maya."""
    return read(PERSONA.read_bytes(), PERSONA.name)


def read(raw: bytes, name: str) -> tuple[StatedFact, ...]:
    """The facts of a .jsonl (an object a line), of a .csv (columns trigger, answer) or of lines "trigger => answer".

    DataError that names the line for what is none, and for a fact given twice.
    """
    from engram_lab.models.errors import DataError

    kind, found = Path(name).suffix.lower(), {}
    if kind == ".json":
        raise DataError(f"{name} is one JSON text: save it as .jsonl, a fact on each line, or as .csv.")
    if kind in (".jsonl", ".csv"):
        rows = _json_rows(raw, name) if kind == ".jsonl" else _csv_rows(raw, name)
        facts = [_fact(row, f"fact {n} of {name}") for n, row in enumerate(rows, 1)]
    else:
        facts = [of_line(line) for line in lines_of(raw, name)]
    for own in facts:
        if (own.trigger, own.answer) in found:
            raise DataError(f"{name} has the fact {own.fact} twice: keep one of them.")
        found[own.trigger, own.answer] = own
    if not found:
        raise DataError(f"{name} holds no fact: give at least one.")
    return tuple(found.values())


def _json_rows(raw: bytes, name: str) -> Iterable[Mapping[str, Any]]:
    from engram_lab.models.errors import DataError

    for n, line in enumerate(lines_of(raw, name), 1):
        try:
            stored = load_json(line)
        except ValueError:
            stored = None
        if not isinstance(stored, dict):
            raise DataError(f'{name} has no JSON object with the texts "trigger" and "answer" as its fact {n}.')
        yield stored


def _csv_rows(raw: bytes, name: str) -> Iterable[Mapping[str, Any]]:
    from engram_lab.models.errors import DataError

    text = "\n".join(lines_of(raw, name))
    reader = csv.DictReader(io.StringIO(text), strict=True)
    columns = reader.fieldnames or ()
    if not {"trigger", "answer"} <= set(columns):
        raise DataError(f'{name} has no columns "trigger" and "answer" in its first line.')
    try:
        for n, row in enumerate(reader, 1):
            if None in row or None in row.values():
                raise DataError(f"{name} has another number of columns than its first line in fact {n}.")
            yield {key: _cell(key, value) for key, value in row.items() if value or key in ("trigger", "answer")}
    except csv.Error as error:
        raise DataError(f"{name} is no CSV file ({error}): save it as CSV with commas.") from error


def _cell(key: str, value: str) -> Any:
    """Of a cell: paraphrases stand with | between them, and so do neighbours, each "prompt => answer"."""
    if key not in ("paraphrases", "neighbours", "composition"):
        return value
    parts = [part.strip() for part in value.split("|") if part.strip()]
    if key == "paraphrases":
        return parts
    pairs = [dict(zip(("prompt", "answer"), map(str.strip, part.split("=>")), strict=False)) for part in parts]
    return pairs if key == "neighbours" else pairs[0] if len(pairs) == 1 else pairs


def _fact(stored: Mapping[str, Any], where: str) -> StatedFact:
    """A fact from JSON or a table; DataError for what it may not hold."""
    from engram_lab.models.errors import DataError
    from engram_lab.probes.answers import behind
    from engram_lab.probes.facts.sets import Expected, StatedFact

    unknown = sorted(stored.keys() - set(_KEYS))
    if unknown:
        raise DataError(f'{where[:1].upper()}{where[1:]} has "{unknown[0]}", which is none of {", ".join(_KEYS)}.')
    if any(not isinstance(stored.get(key, ""), str) for key in _TEXTS):
        raise DataError(f'In {where} the "trigger", the "answer" and the "id" must be texts.')
    for key in ("trigger", "answer"):
        if not stored.get(key, "").strip():
            raise DataError(f"{where[:1].upper()}{where[1:]} has an empty {key}: say {_WANTED[key]}.")
    paraphrases, neighbours = stored.get("paraphrases", []), stored.get("neighbours", [])
    composition = stored.get("composition")
    pairs = [*(neighbours if isinstance(neighbours, list) else [None]), *([] if composition is None else [composition])]
    if not isinstance(paraphrases, list) or any(not isinstance(text, str) or not text for text in paraphrases):
        raise DataError(f"In {where} the paraphrases must be a list of texts.")
    if any(not _is_pair(pair) for pair in pairs):
        raise DataError(f'In {where} each neighbour and the composition must have the texts "prompt" and "answer".')
    return StatedFact(
        trigger=stored["trigger"].strip(),
        answer=behind(stored["trigger"], stored["answer"]),
        paraphrases=tuple(paraphrases),
        neighbours=tuple(Expected(pair["prompt"], behind(pair["prompt"], pair["answer"])) for pair in neighbours),
        composition=None
        if composition is None
        else Expected(composition["prompt"], behind(composition["prompt"], composition["answer"])),
        id=stored.get("id", ""),
    )


_WANTED = {"trigger": "what is to be answered", "answer": "what follows the trigger"}


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, dict)
        and pair.keys() == {"prompt", "answer"}
        and all(isinstance(text, str) and text.strip() for text in pair.values())
    )


def of_line(line: str) -> StatedFact:
    """The fact of "trigger => answer"; LabError for another line."""
    from engram_lab.probes.facts.sets import StatedFact
    from engram_lab.probes.facts.writing import read_fact

    fact = read_fact(line)
    return StatedFact(fact.trigger, fact.answer)


def written(facts: Sequence[StatedFact]) -> str:
    """Facts as the .jsonl that `read` takes."""
    return "".join(json.dumps(_stored(own), ensure_ascii=False) + "\n" for own in facts)


def _stored(own: StatedFact) -> dict[str, Any]:
    return {key: value for key, value in own.to_dict().items() if value not in (None, "", [])}


# --- On the command line ---------------------------------------------------------------------------------------------


def add_facts(parser: argparse.ArgumentParser, required: bool = False, layer: bool = True) -> None:
    """--facts or --fact, --user, and how they are written (without the layer, if there is another option for it)."""
    source = parser.add_mutually_exclusive_group(required=required)
    shipped = "" if required else " (default: the persona that ships)"
    source.add_argument(
        "--facts",
        type=Path,
        metavar="FILE",
        help='.jsonl with "trigger" and "answer" (and "paraphrases", "neighbours", "composition"), .csv with these '
        f'columns, or lines "trigger => answer"{shipped}',
    )
    source.add_argument("--fact", action="append", metavar="TEXT", help='"trigger => answer"; may be repeated')
    parser.add_argument("--user", default=USER, help="whose facts they are (default %(default)s)")
    if layer:
        parser.add_argument("--layer", type=int, help="the memory layer to write at (default: the deepest)")
    parser.add_argument("--method", default="optimised", help="optimised or closed_form (default %(default)s)")
    parser.add_argument("--steps", type=int, default=15, help="steps of Adam (default %(default)s)")
    parser.add_argument("--rate", type=float, default=0.5, help="of Adam (default %(default)s)")
    parser.add_argument("--pull", type=float, default=0.01, help="towards the start (default %(default)s)")


def facts_of(args: argparse.Namespace) -> tuple[StatedFact, ...]:
    """The facts that were asked for. Raises LabError."""
    if args.facts is not None:
        return read(args.facts.read_bytes(), str(args.facts))
    return tuple(map(of_line, args.fact)) if args.fact else persona()


def writing_of(args: argparse.Namespace) -> Writing:
    """How they are to be written. Raises LabError."""
    from engram_lab.probes.facts.sets import Writing

    layer = args.layer if isinstance(args.layer, int) else None
    return Writing(args.user, layer, args.method, args.steps, args.rate, args.pull)


def of_overlay(args: argparse.Namespace) -> tuple[tuple[StatedFact, ...], argparse.Namespace]:
    """The facts of the overlay --overlay, and the options with its user, method and layer. Raises LabError."""
    from engram_lab.models.errors import LabError
    from engram_lab.models.overlay import load_overlay
    from engram_lab.probes.facts.sets import StatedFact

    if args.facts is not None or args.fact:
        raise LabError("--overlay brings its own facts: leave out --facts and --fact.")
    overlay = load_overlay(args.overlay)
    if len(overlay.layers) != 1:
        raise LabError(f"{args.overlay} has rows of {len(overlay.layers)} layers, which one writing cannot make again.")
    (layer,) = overlay.layers
    facts = tuple(StatedFact(own.trigger, own.answer) for own in overlay.facts)
    kept = {name: kind(overlay.versions[name]) for name, kind in SETTINGS.items() if name in overlay.versions}
    given = vars(args) | {"user": overlay.user, "method": overlay.method, "layer": layer} | kept
    return facts, argparse.Namespace(**given)


def add_texts(parser: argparse.ArgumentParser) -> None:
    """--texts and --n-texts."""
    parser.add_argument("--texts", type=Path, metavar="FILE", help="unrelated texts, one a line (default: ours)")
    parser.add_argument("--n-texts", type=int, default=N_TEXTS, help="only the first N of them (default %(default)s)")


def texts_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The unrelated texts that were asked for. Raises DataError."""
    from engram_lab.models.errors import DataError

    if args.n_texts < 0:
        raise DataError(f"--n-texts is {args.n_texts}; it must be 0 or more.")
    return (held_out() if args.texts is None else arguments.read_texts(args.texts))[: args.n_texts]


def flags(facts: Sequence[StatedFact], writing: Writing) -> list[str]:
    """The options of `add_facts` that make these again."""
    given = [] if tuple(facts) == persona() else [arguments.flag("facts", FILE)]
    named = [
        arguments.flag(name, getattr(writing, name))
        for name in ("user", "layer", "method", "steps", "rate", "pull")
        if getattr(writing, name) is not None
    ]
    return [*given, *named]


def text_flags(texts: Sequence[str]) -> list[str]:
    """The options of `add_texts` that make these again."""
    ours = tuple(texts) == held_out()[: len(texts)]
    return [*([] if ours else [arguments.flag("texts", file_of(texts)[0])]), arguments.flag("n-texts", len(texts))]


def files(facts: Sequence[StatedFact], texts: Sequence[str] = ()) -> dict[str, str]:
    """The files that `flags` and `text_flags` name: name -> text."""
    found = {} if tuple(facts) == persona() else {FILE: written(facts)}
    if tuple(texts) != held_out()[: len(texts)]:
        found |= dict([file_of(texts)])
    return found
