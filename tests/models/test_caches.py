"""A memory's state is right in every cache of transformers: each way to generate is held against one without a cache.

Tokens are the same one by one; logits agree within CLOSE of their largest, as forwards of other shapes sum in another
order. Random models whose memory decides: a wrong history or convolution gives other tokens within a few.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from engram_lab.models.engram import CACHE_ARGUMENT
from engram_lab.models.errors import CacheError
from engram_lab.models.grafting import graft
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.memory_state import MemoryState, state_layers
from tests.models import tiny
from tests.models.plain_engram import build

CLOSE = 2e-5  # of the largest logit, in float32
NEW = 24
MODELS = ["engram", "grafted llama", "grafted gemma3"]  # gemma3: windows of 6 tokens in two of its three blocks
GREEDY: dict[str, dict[str, Any]] = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "chunked": {"prefill_chunk_size": 5},
    "static chunked": {"cache_implementation": "static", "prefill_chunk_size": 5},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "assisted": {},  # by another model
}
OFFLOADED = {"offloaded": "offloaded", "offloaded static": "offloaded_static"}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="transformers offloads from a GPU only")


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def grafted(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model with a memory in two blocks, every row random."""
    base = Handle(tiny.make(family, seed, **changes), tiny.byte_level(), family)
    model = graft(base, [1, 2], rows_per_head=500, heads=2).model
    for n, memory in enumerate(model.base_model.memories()):
        memory.table.weight.normal_(generator=torch.Generator().manual_seed(n))
    return model


def made(name: str, seed: int = 0) -> PreTrainedModel:
    if name == "engram":
        return build()
    windows = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}
    return grafted("gemma3", seed, **windows) if name == "grafted gemma3" else grafted("llama", seed)


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: made(name) for name in MODELS}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, models: dict[str, PreTrainedModel]) -> PreTrainedModel:
    return models[request.param]


def prompt(model: PreTrainedModel, batch: int, length: int = 17) -> Tensor:
    top = model.config.get_text_config().vocab_size
    ids = torch.randint(5, min(top, 350), (batch, length), generator=torch.Generator().manual_seed(3))
    ids[:, 9:15] = ids[:, 2:8]  # something that a look-up finds
    return ids


def generated(model: PreTrainedModel, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(ids written [batch, NEW], their logits [batch, NEW, vocab]); greedy unless `options` say otherwise."""
    wanted = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 1, **options}
    out = model.generate(ids, output_logits=True, return_dict_in_generate=True, **wanted)
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, dim=1)


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert found[0].tolist() == expected[0].tolist()
    gap = (found[1] - expected[1]).abs().max() / expected[1].abs().max()
    assert gap < CLOSE, float(gap)


@pytest.mark.parametrize("way", GREEDY)
def test_a_text_goes_on_as_without_a_cache(model: PreTrainedModel, way: str) -> None:
    ids, options = prompt(model, 1), dict(GREEDY[way])
    if way == "assisted":
        options["assistant_model"] = assistant(model)
    assert_same(generated(model, ids, **options), generated(model, ids, use_cache=False))


def assistant(model: PreTrainedModel) -> PreTrainedModel:
    """A model that guesses some tokens and misses others: the same, its norms a little off."""
    helper = made(next(name for name in MODELS if made(name).config.to_dict() == model.config.to_dict()))
    for name, parameter in helper.named_parameters():
        if "norm" in name:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return helper


@pytest.mark.parametrize("way", ["dynamic", "static", "chunked", "static chunked"])
def test_a_left_padded_batch_goes_on_as_without_a_cache(model: PreTrainedModel, way: str) -> None:
    ids = prompt(model, 3)
    mask = torch.ones_like(ids)
    mask[0, :6], mask[1, :1] = 0, 0
    ids[mask == 0] = 1
    found = generated(model, ids, attention_mask=mask, **GREEDY[way])
    assert_same(found, generated(model, ids, attention_mask=mask, use_cache=False))
    alone = generated(model, ids[:1, 6:], use_cache=False)
    assert_same((found[0][:1], found[1][:1]), alone)  # and padding is as if it were not there


@pytest.mark.parametrize("way", ["dynamic", "static"])
def test_beams_go_on_as_without_a_cache(model: PreTrainedModel, way: str) -> None:
    ids = prompt(model, 2)
    found, expected = (
        model.generate(ids, max_new_tokens=NEW, num_beams=4, do_sample=False, pad_token_id=1, **options)
        for options in (GREEDY[way], {"use_cache": False})
    )
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("way", ["dynamic", "static"])
def test_a_text_goes_on_from_the_cache_that_was_returned(model: PreTrainedModel, way: str) -> None:
    ids = prompt(model, 2)
    expected = generated(model, ids, use_cache=False)
    if way == "static":
        cache: Any = StaticCache(config=model.config, max_cache_len=ids.shape[1] + NEW)
    else:
        cache = DynamicCache(config=model.config)
    first = generated(model, ids, **{CACHE_ARGUMENT: cache}, max_new_tokens=9, min_new_tokens=9)
    longer = torch.cat([ids, first[0]], dim=1)
    rest = generated(model, longer, **{CACHE_ARGUMENT: cache}, max_new_tokens=NEW - 9, min_new_tokens=NEW - 9)
    assert_same((torch.cat([first[0], rest[0]], 1), torch.cat([first[1], rest[1]], 1)), expected)


@needs_gpu
@pytest.mark.parametrize("way", OFFLOADED)
def test_an_offloaded_cache_goes_on_as_one_that_is_not(way: str) -> None:
    for name in MODELS:
        model = made(name).to("cuda")
        ids = prompt(model, 2).cuda()
        assert_same(generated(model, ids, cache_implementation=OFFLOADED[way]), generated(model, ids, use_cache=False))


def test_offloading_passes_by_what_a_memory_holds(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which layer a cache brings back next: behind the last attention layer the first, as without a memory."""
    monkeypatch.setattr(cache_utils.torch, "Stream", lambda: torch.no_grad())  # a context: there is no GPU to wait for
    n_layers = model.config.get_text_config().num_hidden_layers
    for kind in (DynamicCache, lambda **options: StaticCache(max_cache_len=9, **options)):
        cache = kind(config=model.config, offloading=True)
        state_layers(cache, n_layers, 2)
        came: list[int] = []
        for n, layer in enumerate(cache.layers):
            monkeypatch.setattr(layer, "prefetch", lambda n=n, came=came: came.append(n))
        for after in range(n_layers):
            cache.prefetch(after + 1, only_non_sliding=False)
        assert came == [*range(1, n_layers), 0]


@pytest.mark.parametrize("name", MODELS[:2])  # transformers quantises no windows
@pytest.mark.parametrize(("package", "backend"), [("torch", "fp8"), ("optimum", "quanto"), ("hqq", "hqq")])
def test_a_quantised_cache_goes_on_or_says_what_it_needs(
    models: dict[str, PreTrainedModel], name: str, package: str, backend: str
) -> None:
    """Its keys and values are rounded: the memory's state, which is not, has to be that of the tokens written."""
    model = models[name]
    options = {"cache_implementation": "quantized", "cache_config": {"backend": backend}}
    ids = prompt(model, 2)
    if importlib.util.find_spec(package) is None:
        with pytest.raises(ImportError, match=backend):
            generated(model, ids, **options)
        return
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, **options)
    cache = out[CACHE_ARGUMENT]
    clean = DynamicCache(config=model.config)
    model(out.sequences[:, :-1], **{CACHE_ARGUMENT: clean})
    histories = [next(layer for layer in kept.layers if isinstance(layer, MemoryState)).keys for kept in (cache, clean)]
    assert torch.equal(*histories)


def test_packed_documents_stay_apart_in_a_static_cache(models: dict[str, PreTrainedModel]) -> None:
    model = models["engram"]
    ids = prompt(model, 1)
    positions = torch.cat([torch.arange(8), torch.arange(9)])[None]
    cache = StaticCache(config=model.config, max_cache_len=40)
    parts = [
        model(ids[:, part], position_ids=positions[:, part], **{CACHE_ARGUMENT: cache}).logits
        for part in (slice(0, 5), slice(5, 12), slice(12, 13), slice(13, 17))
    ]
    whole = model(ids, position_ids=positions, use_cache=False).logits
    assert (torch.cat(parts, dim=1) - whole).abs().max() < CLOSE * whole.abs().max()


def test_a_cache_that_the_memory_cannot_use_is_refused(model: PreTrainedModel) -> None:
    ids = prompt(model, 1)
    encoder_decoder = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(CacheError, match=r"keep its state in a EncoderDecoderCache: use a dynamic or a static cache"):
        model(ids, **{CACHE_ARGUMENT: encoder_decoder})
    other = tiny.make("gemma3" if "Gemma" in type(model).__name__ else "llama")
    foreign = other(prompt(other, 1), use_cache=True)[CACHE_ARGUMENT]
    with pytest.raises(CacheError, match="holds 17 tokens whose memory is not in it"):
        model(ids, **{CACHE_ARGUMENT: foreign})


@pytest.mark.slow
@pytest.mark.parametrize("way", [*GREEDY, "beams", "padded static"])
def test_the_shipped_engram_goes_on_as_without_a_cache(way: str) -> None:
    handle = open_model("engram-mini")
    model = handle.model
    ids = torch.tensor([handle.encode("The river runs past the old mill. The river runs past the old")])
    options: dict[str, Any] = dict(GREEDY.get(way, {}))
    rest: dict[str, Any] = {}
    if way == "assisted":
        options["assistant_model"] = open_model("engram-mini", dtype="bfloat16").model.float()
    elif way == "padded static":
        options["cache_implementation"] = "static"
        ids = torch.cat([torch.zeros(1, 5, dtype=torch.int64), ids], dim=1)
        rest["attention_mask"] = (torch.arange(ids.shape[1]) >= 5).long()[None]
    elif way == "beams":
        options["cache_implementation"] = "static"
        rest["num_beams"] = 4
        beams = [
            model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **rest, **more)
            for more in (options, {"use_cache": False})
        ]
        assert torch.equal(*beams)
        return
    assert_same(generated(model, ids, **rest, **options), generated(model, ids, **rest, use_cache=False))
