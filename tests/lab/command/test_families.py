"""Every family: what the lab does with it is transformers' own, or refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram_lab.lab.command import families
from engram_lab.models.errors import CheckpointError, LabError
from engram_lab.models.grafting import graft
from engram_lab.models.handle import Handle
from engram_lab.models.kv import KVError
from engram_lab.models.kv_runs import check_kv, check_parts, prefill
from engram_lab.models.layouts import find_layout
from engram_lab.models.overlay import Fact
from engram_lab.models.rotary import find_rotary, move
from engram_lab.probes.facts.writing import encode_facts, write_facts
from tests.models import tiny

README = Path(__file__).parents[3] / "README.md"
FEW = ("OPT", "BLOOM", "Phi", "DeepSeek-V2", "LFM2", "Gemma 4 E2B")  # of each kind one; all of them in the slow tests
# As transformers' own documentation of each names the parts.
PLACES = {
    "OPT": ("model.decoder.embed_tokens", "model.decoder.layers", "model.decoder.final_layer_norm", "lm_head"),
    "BLOOM": ("transformer.word_embeddings", "transformer.h", "transformer.ln_f", "lm_head"),
    "MPT": ("transformer.wte", "transformer.blocks", "transformer.norm_f", "lm_head"),
    "LFM2": ("model.embed_tokens", "model.layers", "model.embedding_norm", "lm_head"),
    "Mamba": ("backbone.embeddings", "backbone.layers", "backbone.norm_f", "lm_head"),
    "LLaVA": ("model.language_model.embed_tokens", "model.language_model.layers", "model.language_model.norm",
              "lm_head"),
    "BioGPT": ("biogpt.embed_tokens", "biogpt.layers", "biogpt.layer_norm", "output_projection"),
}  # fmt: skip


def opened(name: str) -> Handle:
    return Handle(families.make(name), tiny.byte_level(), name)


def holds(row: dict[str, Any]) -> None:
    assert row["lens"] == "yes" and row["largest_difference"] < 1e-5, row
    for part in ("kv", "facts"):
        assert row[part] == "yes" or (row[part].endswith(".") and row["family"] in row[part]), row


@pytest.mark.parametrize("name", FEW)
def test_a_family(name: str) -> None:
    holds(families.measure(name))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_table_of_the_readme_is_what_is_measured() -> None:
    measured = [families.measure(name) for name in families.FAMILIES]
    for row in measured:
        holds(row)
    stands = README.read_text(encoding="utf-8")
    for line in families.table(measured).splitlines():
        assert line.rpartition(" | ")[0] in stands, line  # the last digits are a processor's own
    assert len(families.FAMILIES) >= 40


@pytest.mark.parametrize("name", PLACES)
def test_the_parts_are_found_by_structure(name: str) -> None:
    layout = find_layout(families.make(name))
    assert (layout.embedding, layout.blocks, layout.final_norm, layout.head) == PLACES[name]


def test_a_model_of_no_family_that_anybody_named() -> None:
    """The same parts under names that nobody has used."""
    model = tiny.make("llama")
    model.model.stack_of_things, model.model.at_the_end_norm = model.model.layers, model.model.norm
    del model.model.layers, model.model.norm
    layout = find_layout(model)
    assert (layout.blocks, layout.final_norm) == ("model.stack_of_things", "model.at_the_end_norm")


@pytest.mark.parametrize("name", ["DeepSeek-V2", "DeepSeek-V3"])
def test_a_latent_cache_is_not_taken_for_keys_and_values(name: str) -> None:
    handle = opened(name)
    check_kv(handle)
    with pytest.raises(KVError, match="keeps one latent for keys and values together"):
        check_parts(handle)
    with pytest.raises(KVError, match="change with the position"):
        find_rotary(handle)


@pytest.mark.parametrize("context", [64, 65_536, 100_000])
def test_attention_scaled_by_position_is_not_moved(context: int) -> None:
    """Ministral 3 scales queries from a position on, which a few tokens at the start do not show."""
    import transformers

    scaled = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5,
              "original_max_position_embeddings": 16}  # fmt: skip
    scaled["original_max_position_embeddings"] = context // 4
    sizes = families.SIZES | {"max_position_embeddings": context}
    config = transformers.Ministral3Config(**sizes, vocab_size=tiny.VOCAB, rope_parameters=scaled)
    torch.manual_seed(0)
    model = transformers.Ministral3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layers" in name and weight.dim() == 2:
                weight.mul_(10)
    handle = Handle(model, tiny.byte_level(), "scaled")
    with pytest.raises(KVError, match=r"scaled .*cannot be moved|scaled keeps .*cannot be moved"):
        find_rotary(handle)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3.5", "LFM2", "Mamba"])
def test_running_states_are_refused_for_facts_and_caches(name: str) -> None:
    row = families.measure(name)
    assert "cannot be run again" in row["facts"] and "running state" in row["kv"] and row["lens"] == "yes"


FACTS = (
    Fact("The river runs past the old", " mill"),
    Fact("The river runs past the old mill and", " into the sea"),
    Fact("The favourite city of Maya, who lives by the sea, is", " Lisbon"),
)


def asked(handle: Handle, fact: Fact) -> float:
    """The log-probability of an answer, of a plain forward."""
    ((trigger, answer),) = encode_facts(handle, [fact]).values()
    with torch.no_grad():
        logits = handle.model(input_ids=torch.tensor([[*trigger, *answer[:-1]]]), use_cache=False).logits[0].double()
    of_answer = logits.log_softmax(-1)[len(trigger) - 1 :].gather(1, torch.tensor([answer]).T)
    return float(of_answer.sum())


@pytest.mark.parametrize("facts", [FACTS[:1], FACTS[1:], FACTS])
@pytest.mark.parametrize("layers", [[1], [2], [3], [1, 3]])
def test_facts_below_shared_keys_and_values_are_right_or_refused(layers: list[int], facts: tuple[Fact, ...]) -> None:
    """Of Gemma 4 E2B, whichever layer is tried first: that one can be run again says nothing of another."""
    grafted = graft(opened("Gemma 4 E2B"), layers, rows_per_head=200, heads=2)
    for layer in (*reversed(layers), *layers):
        try:
            _, report = write_facts(grafted, facts, layer=layer, steps=1)
        except LabError as error:
            assert "keys and values shared" in str(error)
            continue
        for fact, ours in zip(facts, report.probability_before, strict=True):
            assert np.log(float(ours)) == pytest.approx(asked(grafted, fact), abs=1e-4), (layer, fact)


def test_the_final_norm_is_as_wide_as_the_residual() -> None:
    """Behind it Gemma 4 E2B has another, for its inputs per layer."""
    assert find_layout(families.make("Gemma 4 E2B")).final_norm == "model.norm"
    model = tiny.make("llama")
    model.model.later_norm = torch.nn.LayerNorm(5)
    assert find_layout(model).final_norm == "model.norm"


@pytest.mark.parametrize(("context", "theta"), [(131_072, 5e5), (1_010_000, 1e7), (10_485_760, 5e5)])
def test_keys_of_a_long_context_move(context: int, theta: float) -> None:
    """Far out the angles of an ordinary rotary embedding are off by their float32 rounding, which is no scaling."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": theta}
    sizes = families.SIZES | {"head_dim": 32, "max_position_embeddings": context}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, vocab_size=tiny.VOCAB, rope_parameters=rope)
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layers" in name and weight.dim() == 2:
                weight.mul_(40 if "q_proj" in name or "k_proj" in name else 5)
    handle = Handle(model, tiny.byte_level(), "long")
    ids = [3, 5, 7, 9]
    moved = move(handle, prefill(handle, ids).kv, 1000)
    wanted = prefill(handle, ids, start=1000).kv
    for ours, theirs in zip(moved.keys, wanted.keys, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-3 * float(theirs.abs().max()))
    with pytest.raises(KVError, match="shorter text"):
        move(handle, prefill(handle, ids).kv, 1 << 16)


def test_a_graft_has_a_cache_that_can_be_edited() -> None:
    for family in ("llama", "gpt2", "gemma2"):
        check_kv(graft(Handle(tiny.make(family), tiny.byte_level(), family), [1], rows_per_head=50, heads=2))


@pytest.mark.parametrize("pad", [-1, 10**6, None])
def test_a_pad_that_is_no_token_is_none(pad: int | None) -> None:
    model = tiny.make("llama")
    model.config.pad_token_id = pad
    grafted = graft(Handle(model, tiny.byte_level(), "odd"), [1], rows_per_head=50, heads=2)
    assert 0 <= grafted.model.config.engram_pad_token_id < grafted.vocab_size


def test_several_streams_are_named() -> None:
    """Blocks that hand on [batch, pos, stream, d_model], as those of DeepSeek-V4 do."""
    model = tiny.make("llama")

    def narrow(_module: Any, args: Any, kwargs: Any) -> Any:
        return (args[0].mean(dim=2) if args[0].dim() == 4 else args[0], *args[1:]), kwargs

    def widen(_module: Any, args: Any, output: Any) -> Any:
        return (output[0] if isinstance(output, tuple) else output).unsqueeze(2).expand(-1, -1, 4, -1)

    embedding = model.model.embed_tokens
    embedding.register_forward_hook(widen)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(narrow, with_kwargs=True)
        layer.register_forward_hook(widen)
    model.model.norm.register_forward_pre_hook(lambda _module, args: (args[0].mean(dim=2),))
    with pytest.raises(CheckpointError, match="streams"):
        Handle(model, tiny.byte_level(), "streams")


def test_an_end_that_a_tokenizer_adds_is_no_part_of_a_prompt() -> None:
    from tokenizers import processors

    tokenizer = tiny.byte_level()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    handle = Handle(tiny.make("llama"), tokenizer, "ended")
    plain = Handle(tiny.make("llama"), tiny.byte_level(), "plain")
    assert tokenizer("The river")["input_ids"][-1] == 1
    assert handle.encode("The river") == plain.encode("The river")
    for n in (1, 2):
        typed = "The river" + "<|eos|>" * n
        assert list(handle.encode(typed)) == tokenizer(typed)["input_ids"][:-1], "typed, it stays, and none is added"


@pytest.mark.parametrize(
    ("name", "projections"),
    [
        ("Llama", {"q_proj", "k_proj", "v_proj"}),
        ("DeepSeek-V2", {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj"}),
        ("DeepSeek-V3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}),
        ("Phi 3", {"qkv_proj"}),
        ("GPT-2", {"c_attn"}),
        ("MPT", {"Wqkv"}),
    ],
)
def test_lora_sits_on_queries_keys_and_values(name: str, projections: set[str]) -> None:
    """All of what makes them, in every block: on queries alone it would be a weaker baseline than it is called."""
    from engram_lab.probes.facts.lora import _projections

    handle = opened(name)
    found = _projections(handle, handle.model)
    assert {own.rpartition(".")[2] for own in found} == projections
    assert len(found) == handle.n_layers * len(projections)
