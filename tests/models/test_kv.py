"""Caches as values: edits against edits by hand on transformers' own cache, runs against whole forwards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from engram_lab.models import EngramConfig, EngramForCausalLM
from engram_lab.models.errors import PromptError
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.kv import KV, KVEdit, KVError, blank_each, shared_cache, splice, stack, swap, swap_each
from engram_lab.models.kv_runs import check_kv, continue_from, generate, prefill, recompute
from engram_lab.models.rotary import move
from engram_lab.models.tables import memories
from tests.models import tiny

FAMILIES = ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "gemma3", "engram"]
N = 12


def engram() -> EngramForCausalLM:
    torch.manual_seed(0)
    shape = tiny.SMALL_LLAMA | {"engram_layer_ids": [2, 0], "engram_vocab_size": 50, "engram_n_heads": 2}
    config = EngramConfig(**shape, engram_head_dim=8, engram_compressed_vocab_size=tiny.VOCAB, bos_token_id=0)
    model = EngramForCausalLM(config).eval()
    with torch.no_grad():
        for memory in model.model.memories():
            memory.conv.weight.normal_()
        # Several tokens share a canonical id, as in a real map.
        model.model.canonical_ids.copy_(torch.arange(tiny.VOCAB) // 2)
    return model


@once
def opened(family: str) -> Handle:
    model = engram() if family == "engram" else tiny.make(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name and "wte" not in name:
                parameter.mul_(5)  # so that what is attended to shows in the logits
    return Handle(model, tiny.byte_level(), family)


@pytest.fixture(params=FAMILIES)
def handle(request: pytest.FixtureRequest) -> Handle:
    return opened(request.param)


def text(seed: int = 0, length: int = N) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, tiny.VOCAB, (1, length), generator=generator)


def bare(handle: Handle, ids: Tensor, **options: Any) -> Any:
    with handle.running():
        return handle.model(ids, **options)


def blank(kv: KV, positions: Sequence[int], how: str = "zero", layers: tuple[int, ...] | None = None) -> KV:
    return blank_each(kv, [KVEdit(tuple(positions), layers)], how)


def same(one: KV, other: KV) -> bool:
    mine, theirs = ((*kv.keys, *kv.values, *kv.state, kv.ids, kv.positions) for kv in (one, other))
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def close(one: Tensor, other: Tensor, limit: float = 1e-5) -> bool:
    return bool((one - other).abs().max() <= limit * other.abs().max())


def test_a_prefill_is_the_bare_forward_and_its_cache(handle: Handle) -> None:
    run = prefill(handle, text(), logits="all")
    out = bare(handle, text(), cache=DynamicCache(), use_cache=True)
    assert torch.equal(run.logits, out.logits)
    for layer in range(handle.n_layers):
        assert torch.equal(run.kv.keys[layer], out.past_key_values.layers[layer].keys)
        assert torch.equal(run.kv.values[layer], out.past_key_values.layers[layer].values)
    assert run.kv.n_tokens == run.kv.next_position == N and run.kv.ids.tolist() == text().tolist()
    assert run.kv.n_bytes == sum(t.nbytes for t in (*run.kv.keys, *run.kv.values, *run.kv.state))
    assert close(prefill(handle, text()[0].tolist()).logits, run.logits[:, -1:])


def test_going_on_from_a_cache_is_the_whole_forward(handle: Handle) -> None:
    whole = bare(handle, text()).logits
    kv = prefill(handle, text()[:, :5]).kv
    before = kv.digest()
    rest = prefill(handle, text()[:, 5:], kv, logits="all")
    assert close(rest.logits, whole[:, 5:])
    assert torch.equal(continue_from(handle, kv, text()[0, 5:]), rest.logits)
    assert kv.digest() == before and kv.n_tokens == 5
    again = prefill(handle, text()).kv
    assert all(close(a, b) for a, b in zip(rest.kv.keys, again.keys, strict=True))
    assert all(close(a.float(), b.float()) for a, b in zip(rest.kv.state, again.state, strict=True))


def test_swapping_nothing_itself_or_everything_is_a_clean_run(handle: Handle) -> None:
    stale, donor = (prefill(handle, text(seed)).kv.first(N - 1) for seed in (0, 1))
    digests = stale.digest(), donor.digest()
    last = text(0)[0, -1:]
    clean, other = continue_from(handle, stale, last), continue_from(handle, donor, last)
    everything = range(N - 1)
    assert not close(clean, other, 1e-2)
    assert torch.equal(continue_from(handle, swap(stale, stale, everything), last), clean)
    assert torch.equal(continue_from(handle, swap(stale, donor, []), last), clean)
    assert torch.equal(continue_from(handle, swap(stale, donor, everything), last), other)
    assert same(swap(stale, donor, everything), donor) and same(swap(stale, stale, [3, 5]), stale)
    # K and V one after the other are the same cache; a token's id goes only with both.
    halves = swap(swap(stale, donor, everything, part="k"), donor, everything, part="v")
    assert all(
        torch.equal(a, b) for a, b in zip((*halves.keys, *halves.values), (*donor.keys, *donor.values), strict=True)
    )
    edited = swap(stale, donor, [2, 4])
    assert torch.equal(continue_from(handle, edited, last), continue_from(handle, edited, last))
    assert (stale.digest(), donor.digest()) == digests


def test_an_edit_is_the_one_made_by_hand_on_transformers_cache(handle: Handle) -> None:
    stale, donor = (prefill(handle, text(seed)).kv.first(N - 1) for seed in (0, 1))
    last = text(0)[:, -1:]
    for layers, part in [((1,), "kv"), ((0, 2), "k"), (None, "v")]:
        cache = shared_cache(stale.copy())
        for layer in layers or range(handle.n_layers):
            for name, source in (("keys", donor.keys), ("values", donor.values)):
                if name[0] in part:
                    getattr(cache.layers[layer], name)[:, :, [3, 7]] = source[layer][:, :, [3, 7]]
        # An Engram's memories are in blocks 2 and 0: layer 1 alone, and K or V alone, leave their state.
        by_hand = bare(handle, last, cache=cache, position_ids=torch.tensor([[N - 1]])).logits
        edited = swap(stale, donor, [3, 7], layers, part)
        assert torch.equal(continue_from(handle, edited, last), by_hand)
        assert not torch.equal(by_hand, continue_from(handle, stale, last))


def test_batched_edits_are_the_single_ones(handle: Handle) -> None:
    stale, donor = (prefill(handle, text(seed)).kv.first(N - 1) for seed in (0, 1))
    last = text(0)[0, -1:]
    edits = [KVEdit(()), *(KVEdit((p,), (layer,)) for p in (0, 4, 9) for layer in (0, 2)), KVEdit((1, 2), None, "v")]
    batched = continue_from(handle, swap_each(stale, donor, edits), last)
    for row, edit in enumerate(edits):
        one = swap(stale, donor, edit.positions, edit.layers, edit.part)
        assert same(swap_each(stale, donor, edits).row(row), one)
        assert close(batched[row : row + 1], continue_from(handle, one, last))
    clean = continue_from(handle, stale.expand(len(edits)), last)
    assert torch.equal(batched[0], clean[0])  # an empty edit in a batch is the clean row of that shape
    stacked = stack([swap(stale, donor, e.positions, e.layers, e.part) for e in edits])
    assert torch.equal(continue_from(handle, stacked, last), batched)
    blanked = blank_each(stale, edits, "mean")
    assert same(blanked.row(3), blank(stale, edits[3].positions, "mean", edits[3].layers))


def test_blanking(handle: Handle) -> None:
    kv = prefill(handle, text()).kv
    before = kv.digest()
    zero, mean = blank(kv, [2, 5], layers=(1,)), blank_each(kv, [KVEdit((2,), None, "v")], "mean")
    assert not zero.keys[1][:, :, [2, 5]].any() and not zero.values[1][:, :, [2, 5]].any()
    assert torch.equal(zero.keys[1][:, :, 3:5], kv.keys[1][:, :, 3:5]) and torch.equal(zero.keys[0], kv.keys[0])
    by_hand = sum(kv.values[0][:, :, n] for n in range(N)) / N
    assert close(mean.values[0][:, :, 2], by_hand) and torch.equal(mean.keys[0], kv.keys[0])
    whole = blank(kv, range(N))
    assert not any(t.any() for t in (*whole.keys, *whole.values, *whole.state[1:]))
    assert torch.equal(whole.ids, kv.ids) and all(map(torch.equal, whole.state[:1], kv.state[:1]))
    assert kv.digest() == before


def test_a_window_leaves_out_what_it_should_from_a_cache_that_keeps_everything() -> None:
    model = tiny.make("gemma3", sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2)
    model = type(model)(model.config).eval()
    windowed = Handle(model, tiny.byte_level(), "windowed")
    check_kv(windowed)
    own = bare(windowed, text(), cache=DynamicCache(config=model.config), use_cache=True).past_key_values
    assert own.layers[0].keys.shape[2] == 3  # transformers has dropped the rest
    step = bare(windowed, text(1, 1), cache=own, position_ids=torch.tensor([[N]])).logits
    kv = prefill(windowed, text()).kv
    assert kv.keys[0].shape[2] == N
    assert close(continue_from(windowed, kv, text(1, 1)), step)
    # Layer 0 no longer sees position 2, the full layer 1 does.
    clean = continue_from(windowed, kv, text(1, 1))
    assert torch.equal(continue_from(windowed, blank(kv, [2], layers=(0,)), text(1, 1)), clean)
    assert not torch.equal(continue_from(windowed, blank(kv, [2], layers=(1,)), text(1, 1)), clean)


def test_greedy_generation_is_transformers_own(handle: Handle) -> None:
    ids = text(3)
    out = bare(handle, ids).logits  # warm-up of nothing: the text itself is not changed by it
    assert out.shape[1] == N
    with handle.running():
        wanted = handle.model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    kv = prefill(handle, ids[:, :-1]).kv
    seen: list[float] = []
    written, run = generate(handle, kv, ids[0, -1:], 6, progress=seen.append)
    assert written.tolist() == wanted[:, N:].tolist() and seen == [n / 6 for n in range(6)]
    assert run.kv.ids.tolist() == wanted.tolist()
    assert close(run.logits[:, -1], bare(handle, wanted).logits[:, -1])
    stopped, _ = generate(handle, kv.expand(2), ids[0, -1:], 6, stop=[int(written[0, 2])])
    first = written[0].tolist().index(int(written[0, 2])) + 1
    assert stopped.tolist() == [written[0, :first].tolist()] * 2
    nothing, run = generate(handle, kv, ids[0, -1:], 0)
    assert nothing.shape == (1, 0) and close(run.logits[:, -1], out[:, -1])


def test_recomputing_everything_is_a_fresh_prefill_and_nothing_is_itself(handle: Handle) -> None:
    fresh = prefill(handle, text()).kv
    broken = blank(fresh, range(4, 9))
    assert recompute(handle, broken, 4, 0) is broken
    part = recompute(handle, broken, 4, 3)
    for made, kept, right in zip(
        part.keys + part.state[1:], broken.keys + broken.state[1:], fresh.keys + fresh.state[1:], strict=True
    ):
        assert close(made[:, :, 4:7], right[:, :, 4:7])
        assert torch.equal(made[:, :, 7:], kept[:, :, 7:]) and torch.equal(made[:, :, :4], kept[:, :, :4])
    whole = recompute(handle, broken, 0, N)
    assert same(whole, fresh)


def test_a_batch_of_texts(handle: Handle) -> None:
    both = torch.cat([text(0), text(1)])
    kv = prefill(handle, both).kv
    assert kv.batch == 2
    logits = continue_from(handle, kv, torch.tensor([[5], [6]]))
    for row in range(2):
        alone = continue_from(handle, prefill(handle, both[row]).kv, [5 + row])
        assert close(logits[row : row + 1], alone)
    forked = prefill(handle, both[:, :3], prefill(handle, text(2)).kv)  # two suffixes of one cache
    assert forked.kv.batch == 2 and forked.kv.ids[1].tolist() == text(2)[0].tolist() + both[1, :3].tolist()


# --- Engram: what else a position holds ----------------------------------------------------------------------------


def rows_addressed(handle: Handle, kv: KV | None, ids: Tensor) -> list[Tensor]:
    """[memory][batch, pos, order * head]: the rows that ids read, spied on by a hook of torch's own."""
    found: list[Tensor] = []
    hooks = [
        memory.hash.register_forward_hook(lambda module, inputs, rows: found.append(rows.clone()))
        for memory in memories(handle)
    ]
    try:
        prefill(handle, ids, kv)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def test_after_a_splice_rows_are_those_of_the_spliced_text() -> None:
    handle = opened("engram")
    prefix_ids, block_ids, suffix = text(0, 7), text(1, 1), text(2, 4)  # a block that trigrams reach across
    prefix, block = prefill(handle, prefix_ids).kv, prefill(handle, block_ids).kv
    moved = move(handle, block, 7)
    spliced = splice(prefix, moved)
    whole_ids = torch.cat([prefix_ids, block_ids], dim=1)
    whole = prefill(handle, whole_ids).kv
    assert torch.equal(spliced.state[0], whole.state[0])
    assert torch.equal(spliced.ids, whole_ids) and torch.equal(spliced.positions, whole.positions)
    wanted = rows_addressed(handle, whole, suffix)
    assert len(wanted) == 2
    assert all(map(torch.equal, rows_addressed(handle, spliced, suffix), wanted))
    # The block alone ends elsewhere: its history does not reach into the prefix.
    assert not all(map(torch.equal, rows_addressed(handle, moved, suffix), wanted))
    # Blocks' own conv values stay until they are recomputed, and then are those of the text.
    assert torch.equal(spliced.state[1][:, :, 7:], block.state[1])
    redone = recompute(handle, spliced, 7, 1)
    assert all(
        close(a.float(), b.float()) for a, b in zip(redone.state + redone.keys, whole.state + whole.keys, strict=True)
    )
    assert not close(spliced.state[1], whole.state[1], 1e-3)


def test_the_history_is_swapped_with_the_whole_token_only() -> None:
    handle = opened("engram")
    stale, donor = (prefill(handle, text(seed)).kv for seed in (0, 1))
    suffix = text(2, 3)
    whole = swap(stale, donor, [N - 1])
    by_text = torch.cat([text(0)[:, :-1], text(1)[:, -1:]], dim=1)
    assert torch.equal(whole.ids, by_text)
    wanted = rows_addressed(handle, prefill(handle, by_text).kv, suffix)
    assert all(map(torch.equal, rows_addressed(handle, whole, suffix), wanted))
    clean = rows_addressed(handle, stale, suffix)
    assert not all(map(torch.equal, clean, wanted))
    for layers, part in [((0,), "kv"), (None, "v")]:
        edited = swap(stale, donor, [N - 1], layers, part)
        assert all(map(torch.equal, rows_addressed(handle, edited, suffix), clean))
    # Memory layers in the order of the configuration: 2, then 0.
    edited = swap(stale, donor, [N - 1], layers=[2])
    assert stale.state_layers == (2, 0)
    assert torch.equal(edited.state[1][:, :, -1], donor.state[1][:, :, -1])
    assert torch.equal(edited.state[2], stale.state[2])


def test_the_shipped_engram_goes_through_all_of_it() -> None:
    handle = open_model("engram-mini")
    check_kv(handle)
    ids = torch.tensor([handle.encode("The capital of France is Paris, and the capital of Japan is Tokyo.")])
    cut = 6
    prefix, block = prefill(handle, ids[:, :cut]).kv, prefill(handle, ids[:, cut:]).kv
    digests = prefix.digest(), block.digest()
    spliced = splice(prefix, move(handle, block, cut))
    suffix = ids[:, :3]
    whole = prefill(handle, ids).kv
    same_rows = map(torch.equal, rows_addressed(handle, spliced, suffix), rows_addressed(handle, whole, suffix))
    assert all(same_rows)
    redone = recompute(handle, spliced, cut, ids.shape[1] - cut)
    assert close(continue_from(handle, redone, suffix), continue_from(handle, whole, suffix), 1e-4)
    assert (prefix.digest(), block.digest()) == digests


# --- Requests that cannot be served -------------------------------------------------------------------------------


def test_a_model_with_running_states_is_refused_in_one_sentence() -> None:
    torch.manual_seed(0)
    config = GraniteMoeHybridConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8,
        mamba_n_groups=1, num_local_experts=0, shared_intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    handle = Handle(GraniteMoeHybridForCausalLM(config), tiny.byte_level(), "hybrid")
    with pytest.raises(KVError, match="running state instead of keys and values per token in 1 of its 2 layers"):
        check_kv(handle)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda h, kv: swap(kv, kv, [N]), "Position 12 is not in both caches"),
        (lambda h, kv: swap(kv, kv.first(3), [5]), "Position 5 is not in both caches, which have the positions 0 to 2"),
        (lambda h, kv: swap(kv, kv, [0], layers=[3]), "no layer 3: the layers are 0 to 2"),
        (lambda h, kv: swap(kv, kv, [0], part="q"), '"q" is no part'),
        (lambda h, kv: swap_each(kv, kv, []), "no edit to make"),
        (lambda h, kv: swap_each(kv.expand(2), kv, [KVEdit(())]), "from one text"),
        (lambda h, kv: swap(kv, prefill(opened("gpt2"), text()).kv, [0]), "same model"),
        (lambda h, kv: blank(kv, [0], "noise"), 'not with "noise"'),
        (lambda h, kv: splice(kv, kv), "stands at position 0 and the prefix ends before 12: move the block"),
        (lambda h, kv: stack([kv, kv.first(3)]), "same length"),
        (lambda h, kv: kv.span(3, 20), "no tokens 3 to 20"),
        (lambda h, kv: kv.row(1), "no row 1"),
        (lambda h, kv: kv.expand(2).expand(3), "2 rows cannot"),
        (lambda h, kv: recompute(h, kv, 10, 5), "10 to 14"),
        (lambda h, kv: prefill(h, torch.ones(2, 1, dtype=torch.int64), kv.expand(3)), "2 rows of ids for 3 caches"),
    ],
)
def test_edits_that_do_not_fit_are_refused(call: Any, words: str) -> None:
    handle = opened("llama")
    with pytest.raises(KVError, match=words):
        call(handle, prefill(handle, text()).kv)


@pytest.mark.parametrize(
    ("ids", "start", "words"),
    [
        ([], None, "no token to run"),
        ([tiny.VOCAB], None, "outside the vocabulary of llama, 0 to 383"),
        ([-1], None, "outside the vocabulary"),
        ([1, 2], 63, "go from position 63 to 64"),
        ([1], -1, "go from position -1"),
    ],
)
def test_ids_that_cannot_run_are_refused(ids: list[int], start: int | None, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        prefill(opened("llama"), ids, start=start)


def test_a_batch_ends_once_each_row_has_ended_at_some_time() -> None:
    """Row by row, of the tokens that a run without an end writes: the last of the first ends is where it stops."""
    handle = Handle(tiny.make("llama", seed=5), tiny.byte_level(), "ends")
    kv = prefill(handle, [[3, 4, 5], [9, 8, 7]]).kv
    free, _ = generate(handle, kv, [[11], [12]], 12)
    pairs = [(a, b) for a in range(6) for b in range(a + 1, 8)]
    for a, b in pairs:
        stop = {int(free[0, a]), int(free[1, b])}
        first = [next(n for n, token in enumerate(row.tolist()) if token in stop) for row in free]
        if first[0] != first[1] and not any({int(x), int(y)} <= stop for x, y in free[:, : max(first) + 3].T.tolist()):
            written, _ = generate(handle, kv, [[11], [12]], 12, stop=stop)
            assert written.shape[1] == max(first) + 1
            return
    pytest.skip("no two ends apart in what this model writes")
