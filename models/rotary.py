"""Moving cached keys to other positions: the inverse of the old rotation, then the new one.

Axes: layer, batch, kv_head, pos, head_dim, pair. A rotary embedding turns pairs of a key's entries by position times
a frequency (RoPE, arXiv 2104.09864). The angles are read from the model's own rotary module at both positions, so
that every scaling of the frequencies is right and rounded as in the model; the length of (cos, sin), which is yarn's
attention factor and in the cached keys already, is divided out. Which entries make a pair, and in which layers, no
module says: it is found out by running a few tokens at several places, up to the end of the context, and seeing
which rotation takes the keys of the first to those of the others. What no rotation explains is refused, and so
is a model whose values change with the position: then keys and values are something else (DeepSeek's latent and rotated
key), or queries are scaled by position (Ministral 3).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engram_lab.models.errors import first_line
from engram_lab.models.handle import Handle
from engram_lab.models.kv import KV, KVError
from engram_lab.models.kv_runs import prefill

_TRIED = 4  # tokens run to find out the pairs
_OFFSET = 7  # how far apart
# How many positions are tried, and moved between. Angles are float32 in every model: far out they are off by their
# rounding (position / 2**24), in which attention that is scaled by position could not be told any more.
_FARTHEST = 1 << 16
# How a module lists its angles: each pair once; all pairs and then all again; each pair twice in a row.
_LISTED = ("once", "halves", "twins")
_PAIRED = ("halves", "twins")  # entries (i, i + width/2), as in Llama, or (2i, 2i + 1), as in GPT-J and Cohere
_LENGTH_DEPENDENT = ("dynamic", "longrope")


_known: weakref.WeakKeyDictionary[Handle, Rotary] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotation of a model's keys: its module, and per layer (type of the layer, listed, paired); None: no turn."""

    module: nn.Module
    layers: tuple[tuple[str | None, str, str] | None, ...]

    def turn(self, keys: Tensor, layer: int, old: Tensor, new: Tensor) -> Tensor:
        """Keys [batch, kv_head, pos, head_dim] of `layer` from the positions `old` [pos] to `new` [pos]."""
        found = self.layers[layer]
        if found is None:
            return keys
        kind, listed, paired = found
        return _turned(keys, self._angles(kind, listed, old), self._angles(kind, listed, new), paired)

    def _angles(self, kind: str | None, listed: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        return _angles(self.module, kind, listed, positions)


def find_rotary(handle: Handle) -> Rotary:
    """How the model turns its keys, tried on two runs of a few tokens; KVError where moving is not possible."""
    if handle in _known:
        return _known[handle]
    module = _module(handle)
    end = min(handle.context, _FARTHEST)
    shifts = sorted({min(_OFFSET, end - _TRIED), end - _TRIED})
    if shifts[0] < 1:
        raise KVError(f"{handle.name} has only {handle.context} positions, too few to move anything.")
    ids = [n * (handle.vocab_size - 1) // _TRIED for n in range(1, _TRIED + 1)]
    here, *others = (prefill(handle, ids, start=shift).kv for shift in (0, *shifts))
    # What rounding does so far out: a step or two further on nothing else differs.
    beside = [prefill(handle, ids, start=max(0, shifts[-1] - step)).kv for step in (1, 2, 3)]
    types = getattr(handle.model.config.get_text_config(), "layer_types", None) or []
    typed = "layer_type" in inspect.signature(module.forward).parameters and types
    least = 1e-3 if handle.dtype == torch.float32 else 5e-2
    layers: list[tuple[str | None, str, str] | None] = []
    with handle.running():
        for layer, keys in enumerate(here.keys):
            kind = types[layer] if typed else None
            errors: dict[Any, float] = {}
            noise = max(_apart(own.values[layer], others[-1].values[layer]) for own in beside)
            tolerance = max(least, 4 * noise) if shifts[-1] > 1024 else least
            try:
                for there in others:
                    if _apart(here.values[layer], there.values[layer]) > tolerance:
                        raise KVError(
                            f"The values that {handle.name} keeps in layer {layer} change with the position, as no "
                            "rotary embedding makes them (a latent in their place, or attention scaled by position), "
                            "so its cache cannot be moved."
                        )
                    for guess, turned in _guesses(module, kind, keys, here.positions, there.positions):
                        errors[guess] = max(errors.get(guess, 0.0), _apart(turned, there.keys[layer]))
            except KVError:
                raise
            except Exception as error:  # a module that is called in another way
                raise KVError(
                    f"The rotary embedding of {handle.name} cannot be read ({first_line(error)}), so its keys "
                    "cannot be moved."
                ) from error
            best = min(errors, key=lambda guess: errors[guess])
            if not errors[best] <= tolerance:
                raise KVError(
                    f"The keys of {handle.name} in layer {layer} do not change with the position as a rotary "
                    f"embedding that this lab knows would do (by {errors[best]:.1%} at best), so they cannot be moved."
                )
            layers.append((kind, *best) if best else None)
    _known[handle] = Rotary(module, tuple(layers))
    return _known[handle]


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest entry of b."""
    return float((a - b).abs().max() / b.abs().max())


def move(handle: Handle, kv: KV, to: int) -> KV:
    """`kv` with its first token at position `to` and the others as far behind it as they were; values stay.

    Right as far as a token's keys depend on its position by the rotation alone, which in a text that starts with the
    first cached token they do. Raises KVError for a model without a rotary embedding, or one whose frequencies depend
    on the length of the text, and for positions outside the context.
    """
    if not kv.n_tokens:
        return kv
    shift = to - int(kv.positions[0])
    if to < 0 or int(kv.positions[-1]) + shift >= handle.context:
        raise KVError(
            f"{kv.n_tokens} tokens moved to position {to} would not be inside the {handle.context} positions of "
            f"{handle.name}."
        )
    if max(int(kv.positions[-1]), int(kv.positions[-1]) + shift) >= _FARTHEST:
        raise KVError(
            f"Keys are moved between the first {_FARTHEST} positions, where it is tried that {handle.name} turns them "
            "by its rotary embedding alone: use a shorter text."
        )
    rotary = find_rotary(handle)
    positions = kv.positions + shift
    with handle.running():
        keys = tuple(rotary.turn(keys, layer, kv.positions, positions) for layer, keys in enumerate(kv.keys))
        state = kv.state
        if state:
            moved = state[0].clone()
            moved[..., 2] += shift
            state = (moved, *state[1:])
    return replace(kv, keys=keys, state=state, positions=positions)


def _module(handle: Handle) -> nn.Module:
    """The model's rotary module, beside its blocks."""
    parent = handle.model.get_submodule(handle.layout.blocks.rpartition(".")[0])
    module: Any = getattr(parent, "rotary_emb", None)
    if module is None:
        raise KVError(
            f"{handle.name} has no rotary embedding: its keys are tied to the positions that they were computed at, "
            "so nothing of its cache can be moved."
        )
    kinds = getattr(module, "rope_type", "default")
    for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
        if kind in _LENGTH_DEPENDENT:
            raise KVError(
                f'The rotary embedding of {handle.name} is of the type "{kind}", whose frequencies depend on the '
                "length of the whole text, so a part of its cache cannot be moved."
            )
    return module


def _angles(module: nn.Module, kind: str | None, listed: str, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) [pos, pair] in float64, on the unit circle."""
    like = torch.zeros(1, dtype=torch.float32, device=positions.device)
    cos, sin = module(like, positions[None]) if kind is None else module(like, positions[None], kind)
    if listed == "halves":
        cos, sin = (t[..., : t.shape[-1] // 2] for t in (cos, sin))
    elif listed == "twins":
        cos, sin = (t[..., ::2] for t in (cos, sin))
    cos, sin = cos[0].double(), sin[0].double()
    length = torch.hypot(cos, sin)
    return cos / length, sin / length


def _turned(keys: Tensor, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], paired: str) -> Tensor:
    """Keys turned by the angle from old to new, each (cos, sin) [pos, pair]; entries behind the pairs stay."""
    cos, sin = new[0] * old[0] + new[1] * old[1], new[1] * old[0] - new[0] * old[1]
    width = 2 * cos.shape[-1]
    index = torch.arange(width, device=keys.device)
    first, second = (index[: width // 2], index[width // 2 :]) if paired == "halves" else (index[::2], index[1::2])
    a, b = keys[..., first].double(), keys[..., second].double()
    out = keys.clone()
    out[..., first] = (a * cos - b * sin).to(keys.dtype)
    out[..., second] = (b * cos + a * sin).to(keys.dtype)
    return out


def _guesses(
    module: nn.Module, kind: str | None, keys: Tensor, old: Tensor, new: Tensor
) -> Iterator[tuple[tuple[str, str] | tuple[()], Tensor]]:
    """(how, keys as they would be at the positions `new`) for every way of listing and pairing that fits."""
    yield (), keys
    for listed in _LISTED:
        before, after = (_angles(module, kind, listed, positions) for positions in (old, new))
        for paired in _PAIRED:
            if 2 * before[0].shape[-1] <= keys.shape[-1]:
                yield (listed, paired), _turned(keys, before, after, paired)
