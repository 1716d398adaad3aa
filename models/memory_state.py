"""Where a memory keeps its state while a text is written: in any cache of transformers, beside keys and values.

Axes: batch, pos (tokens of the cache, all of them), d_model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer

from engram_lab.models.errors import CacheError

_NotAttention: Any = getattr(cache_utils, "DummyLayer", object)  # not in every release of transformers


class MemoryState(DynamicLayer, _NotAttention):
    """A layer of a cache that holds what a memory looks back on, as its keys [batch, 1, pos, any].

    It grows in any kind of cache, static and offloaded ones too, and stays on its device. To transformers it is a layer
    without attention, so that masks and offloading are as without it: a cache with preallocated layers, above all, goes
    on being taken for one, whose unused places must be masked.
    """

    is_compileable = True
    supports_early_init = False


def state_layers(cache: Cache, n_layers: int, n_memory: int) -> list[Any]:
    """The cache's extra layers behind its `n_layers` attention ones: the token history, then one per memory layer.

    The history holds (canonical id, reach, position) as its keys [batch, 1, pos, 3]; a memory layer holds its
    normalised gated values [batch, 1, pos, d_model], which the convolution looks back on. They are made in a cache
    without tokens. CacheError for a cache of another kind, or with tokens that the memory has not seen.
    """
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        raise CacheError(
            f"A memory cannot keep its state in a {type(cache).__name__}: use a dynamic or a static cache, or "
            "use_cache=False."
        )
    while len(layers) < n_layers:  # a cache that makes its layers as they are needed
        layers.append((cache.layer_class_to_replicate or DynamicLayer)())
    past = int(cache.get_seq_length())
    if len(layers) == n_layers and not past:
        layers += [MemoryState() for _ in range(1 + n_memory)]
    state = layers[n_layers:]
    if len(state) != 1 + n_memory or any(layer.get_seq_length() != past for layer in state):
        raise CacheError(
            f"The cache holds {past} tokens whose memory is not in it, as it was made by another model: start with an "
            "empty cache."
        )
    return state


class MemoryGeneration:
    """What generate() leaves to a model with a memory, beside what it does for any."""

    def create_masks_for_generate(self, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The mask [batch, past + pos] as it is, by which the memory knows padding: blocks make theirs of it."""
        return attention_mask

    def _valid_auto_compile_criteria(self, *_: Any) -> bool:
        return False  # the history of a memory grows, which would be compiled anew for each token
