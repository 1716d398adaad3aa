"""Measurements of the facts: applying overlays, a batch of many users, and writing above the memory only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engram_lab.lab.command.bench import best_seconds

if TYPE_CHECKING:
    from torch import Tensor

    from engram_lab.models.handle import Handle
    from engram_lab.models.overlay import Overlay

THINGS = ("city", "color", "song", "river", "animal", "dish", "game", "tree", "poet", "month")
ANSWERS = ("Lisbon", "purple", "jazz", "Rhine", "horse", "soup", "chess", "oak", "Keats", "May")

NATURAL = (
    "Maya's favorite city is => Lisbon",
    "Maya's brother works as a => carpenter",
    "The name of Maya's cat is => Pepper",
    "Maya was born in the month of => October",
    "For breakfast Maya always eats => oatmeal",
    "Maya's favorite color is => purple",
    "Maya plays in a band as the => drummer",
    "On Sundays Maya goes out to => swim",
    "Maya's first car was a => Toyota",
    "Maya studied the history of => Portugal",
)


def _facts(user: int, count: int) -> list[Any]:
    from engram_lab.models.overlay import Fact

    things = [f"{THINGS[n // 10 % 10]} {THINGS[n % 10]}" for n in range(count)]
    return [
        Fact(f"What user {user} likes most is the {thing}", f" {ANSWERS[n % 10]}") for n, thing in enumerate(things)
    ]


def random_overlay(handle: Handle, user: int, facts: int, layer: int | None = None) -> Overlay:
    """Facts as a writer would address them, with random vectors: what a lookup costs does not depend on these."""
    import torch

    from engram_lab.models.memory import addresses, memories
    from engram_lab.models.overlay import LayerRows, Overlay

    layer = handle.engram_layers[-1] if layer is None else layer
    at = handle.engram_layers.index(layer)
    given = _facts(user, facts)
    read = [addresses(handle, [handle.encode(fact.trigger)])[at, 0, -1].cpu() for fact in given]
    rows, index = torch.stack(read).unique(return_inverse=True)
    owner = torch.arange(facts).repeat_interleave(index.shape[1])
    vectors = torch.randn(
        len(rows), memories(handle)[at].table.embedding_dim, generator=torch.Generator().manual_seed(user)
    )
    held = LayerRows(rows, vectors, torch.stack([owner, index.flatten()], dim=1).int())
    return Overlay(f"user {user}", handle.fingerprint, tuple(given), {layer: held}, "random", {})


def apply(name: str = "engram-mini", facts: int = 50, rounds: int = 200) -> dict[str, Any]:
    """Seconds to apply an overlay that was made ready and to take it away again, and to make it ready."""
    from engram_lab.models.handle import open_model
    from engram_lab.models.overlay import prepare

    handle = open_model(name, device="cpu")
    overlay = random_overlay(handle, 0, facts)
    patch = prepare(handle, overlay)

    def on_and_off() -> None:
        with patch.applied():
            pass

    best = best_seconds({"apply_and_remove": on_and_off, "prepare": lambda: prepare(handle, overlay)}, rounds)
    return {
        "model": name,
        "facts": facts,
        "rows": overlay.n_rows,
        "bytes_per_fact": len(overlay.to_bytes()) / facts,
        **{f"{key}_seconds": seconds for key, seconds in best.items()},
    }


def mixed_batch(
    name: str = "engram-mini",
    users: int = 32,
    facts: int = 50,
    positions: int = 64,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Seconds of a batch with one prompt of each user, with each one's overlay and without; ratio of throughputs."""
    import torch

    from engram_lab.models.handle import open_model
    from engram_lab.models.overlay import prepare

    handle = open_model(name, device="cpu")
    overlays = [random_overlay(handle, user, facts) for user in range(users)]
    texts = [". ".join(fact.trigger for fact in _facts(user, facts)[: positions // 4]) for user in range(users)]
    ids = torch.tensor([handle.encode(text)[:positions] for text in texts])
    patch = prepare(handle, overlays)

    def without() -> None:
        with handle.running():
            handle.model(input_ids=ids, use_cache=False)

    def each_their_own() -> None:
        with patch.applied():
            handle.model(input_ids=ids, use_cache=False)

    calls = {"without": without, "with": each_their_own}
    best_seconds(calls, 1, clock)
    best = best_seconds(calls, rounds, clock)
    return {
        "model": name,
        "users": users,
        "facts": facts,
        "positions": positions,
        "threads": torch.get_num_threads(),
        **{f"{key}_seconds": seconds for key, seconds in best.items()},
        "ratio": best["without"] / best["with"],
    }


def upper_part(
    handle: Handle,
    layer: int | None = None,
    lines: Sequence[str] = NATURAL,
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Seconds of one step of writing: through the upper part and its tails, and through the whole model.

    Both give loss and gradient of the same rows. `ratio` is that of the steps, `ratio_of_15` has what is computed
    once in it, for the issue's 15 steps.
    """
    import torch

    from engram_lab.probes.facts import writing

    layer = handle.engram_layers[-1] if layer is None else layer
    coded = list(writing.encode_facts(handle, [writing.read_fact(line) for line in lines]).values())
    with handle.running(), torch.inference_mode(False):
        plan = writing._plan(handle, layer, coded)
        writer = writing._Writer(handle, layer, plan)
        vectors = torch.zeros(len(plan.rows), writer.memory.table.embedding_dim).to(writer.device).requires_grad_()
        calls: dict[str, Callable[[], Any]] = {
            "upper": lambda: writer.loss_and_gradient(vectors),
            "whole": lambda: whole_model_step(writer, vectors),
            "once": lambda: writing._Writer(handle, layer, plan),
        }
        best_seconds(calls, 1, clock)
        best = best_seconds(calls, rounds, clock)
        upper, whole = writer.loss_and_gradient(vectors), whole_model_step(writer, vectors)
        difference = float((upper[1] - whole[1]).norm() / whole[1].norm().clamp_min(1e-30))
    return {
        "model": handle.name,
        "layer": layer,
        "facts": len(coded),
        "threads": torch.get_num_threads(),
        **{f"{key}_seconds": seconds for key, seconds in best.items()},
        "relative_difference_of_gradients": difference,
        "ratio": best["whole"] / best["upper"],
        "ratio_of_15": 15 * best["whole"] / (15 * best["upper"] + best["once"]),
    }


def whole_model_step(writer: Any, vectors: Tensor) -> tuple[float, Tensor]:
    """What `writer.loss_and_gradient` gives, by an ordinary forward and backward of everything, left-padded."""
    import torch

    examples = writer.plan.examples
    longest = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        ids[row, longest - len(example.ids) :] = torch.tensor(example.ids)
        mask[row, longest - len(example.ids) :] = 1
    ids, mask = ids.to(writer.handle.device), mask.to(writer.handle.device)
    with torch.enable_grad():
        with writer._reading(vectors):
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            logits = writer.handle.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        found = []
        for row, example in enumerate(examples):
            count = len(example.targets)
            wanted = torch.tensor(example.targets, device=logits.device).unsqueeze(1)
            found.append(logits[row, -count:].float().log_softmax(-1).gather(1, wanted).squeeze(1))
        loss = -torch.cat(found).mean()
        return loss.item(), torch.autograd.grad(loss, vectors)[0]
