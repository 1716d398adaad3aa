"""The handle against the bare model: same numbers, right parts, one at a time, nothing left behind."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import normalizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engram_lab.models.errors import CheckpointError, LabError, NotFiniteError, PromptError, TargetError
from engram_lab.models.handle import Handle, open_model, single_token
from engram_lab.models.kv_runs import prefill
from tests.full import FULL
from tests.models import tiny

ROOT = Path(__file__).parents[2]
FAMILIES = sorted(tiny.configs())
SENTENCE = "Paris is the capital of France"


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[*FAMILIES, "engram"])
def handle(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> Handle:
    model = tiny.engram(tokenizer) if request.param == "engram" else tiny.make(request.param)
    return Handle(model, tokenizer, request.param)


def bare(handle: Handle, ids: Tensor, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(logits, hidden states before each block and after the final norm), by transformers alone."""
    with handle.running():
        out = handle.model(input_ids=ids, use_cache=False, output_hidden_states=True, **options)
    return out.logits, out.hidden_states


def test_residuals_are_those_of_the_bare_forward(handle: Handle) -> None:
    ids = torch.arange(2 * 9).view(2, 9) * 17 % 350
    got = handle.residuals(ids)
    logits, hidden = bare(handle, ids)
    assert got.states.shape == (handle.n_layers + 1, 2, 9, handle.d_model)
    assert torch.equal(got.logits, logits)
    for layer in range(handle.n_layers):
        assert torch.equal(got.states[layer], hidden[layer])
    with handle.running():
        # transformers gives the last state after the norm, so this checks the norm and the last residual.
        normed = handle.model.get_submodule(handle.layout.final_norm)(got.states[-1])
        assert torch.equal(normed, hidden[-1])
        assert torch.equal(handle.unembed(got.states[-1]), logits)
        assert torch.allclose(handle.unembed(got.states)[-1], logits, atol=1e-5)
    assert torch.equal(handle.residuals(ids.tolist()).logits, logits)  # the second trace, from lists


def test_a_model_that_was_never_wrapped_gives_the_same(tokenizer: PreTrainedTokenizerFast) -> None:
    handle, untouched = Handle(tiny.make("llama"), tokenizer, "llama"), tiny.make("llama")
    ids = torch.tensor([handle.encode(SENTENCE)])
    with torch.inference_mode():
        assert torch.equal(untouched(input_ids=ids).logits, handle.residuals(ids).logits)


def test_what_the_handle_says_of_a_model(handle: Handle) -> None:
    assert handle.layer_names == ("embed", "0", "1", "2") and handle.n_layers == 3
    assert handle.d_model == 32 and handle.context == 64
    assert handle.device == torch.device("cpu") and handle.dtype == torch.float32
    assert handle.n_parameters == sum(p.numel() for p in set(handle.model.parameters()))
    if handle.name == "engram":
        table = handle.model.model.layers[1].memory.table.weight
        assert handle.engram_layers == (1,) and handle.n_table_parameters == table.numel() > 0
    else:
        assert handle.engram_layers == () and handle.n_table_parameters == 0
        assert handle.vocab_size == tiny.VOCAB


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_padding_on_the_left_leaves_the_sequence_as_it_is(family: str, tokenizer: Any) -> None:
    handle = Handle(tiny.make(family), tokenizer, family)
    alone = torch.arange(5, 12)[None]
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), alone], dim=1)
    mask = torch.tensor([[0] * 4 + [1] * 7])
    got = handle.residuals(padded, mask)
    # GPT-2 has learned positions: without position_ids it would be off by far more than rounding.
    assert torch.allclose(got.logits[:, 4:], handle.residuals(alone).logits, atol=1e-5)
    assert torch.allclose(got.states[:, :, 4:], handle.residuals(alone).states, atol=1e-5)


def test_missing_parts_are_named(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny.make("llama")
    model.model.final_layernorm = model.model.norm
    del model.model.norm
    with pytest.raises(CheckpointError, match="moved cannot run a forward pass"):
        Handle(model, tokenizer, "moved")
    model.model.norm = torch.nn.Identity()
    del model.model.final_layernorm
    with pytest.raises(CheckpointError, match="does not find its final norm, beside the blocks"):
        Handle(model, tokenizer, "without")
    model.config.num_hidden_layers = 0
    with pytest.raises(CheckpointError, match="has no decoder blocks"):
        Handle(model, tokenizer, "empty")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_whose_lens_would_be_wrong_is_refused(family: str, tokenizer: Any) -> None:
    model = tiny.make(family)
    base = model.get_submodule(model.base_model_prefix)

    def second_norm(_module: Any, _args: Any, output: Any) -> Any:
        output.last_hidden_state = torch.nn.functional.layer_norm(output.last_hidden_state, (32,))
        return output

    hook = base.register_forward_hook(second_norm)
    with pytest.raises(CheckpointError, match=r"more to its last residual than .* and lm_head \(the logits dif"):
        Handle(model, tokenizer, "second norm")
    hook.remove()
    Handle(model, tokenizer, "as it was")


def test_damaged_weights_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny.make("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"gives no numbers .* weights are damaged"):
        Handle(model, tokenizer, "nan")


@pytest.mark.parametrize(("family", "part"), [("gemma2", "softcap"), ("granite", "divide")])
def test_leaving_out_arithmetic_on_the_logits_would_show(family: str, part: str, tokenizer: Any) -> None:
    handle = Handle(tiny.make(family), tokenizer, family)
    got = handle.residuals([[1, 2, 3]])
    without = dataclasses.replace(handle.layout, **{part: None})
    with handle.running():
        assert not torch.allclose(without.unembed(handle.model, got.states[-1]), got.logits, rtol=0.1)


def test_running_leaves_modes_as_they_were(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny.make("gpt2", resid_pdrop=0.5).train()
    handle = Handle(model, tokenizer, "training")
    assert model.training and torch.is_grad_enabled()
    ids = [[1, 2, 3]]
    assert torch.equal(handle.residuals(ids).logits, handle.residuals(ids).logits)  # no dropout
    with pytest.raises(ZeroDivisionError), handle.running(), handle.running():
        assert torch.is_inference_mode_enabled() and not model.training
        raise ZeroDivisionError
    assert model.training and not torch.is_inference_mode_enabled()
    with handle.running():  # and the lock is free again, for another thread too
        pass
    taken = threading.Thread(target=lambda: handle.residuals(ids))
    taken.start()
    taken.join(20)
    assert not taken.is_alive()
    model(input_ids=torch.tensor(ids)).logits.sum().backward()  # training goes on
    assert model.transformer.wte.weight.grad is not None


def test_a_failed_forward_releases_the_lock(tokenizer: PreTrainedTokenizerFast) -> None:
    handle = Handle(tiny.make("llama"), tokenizer, "llama")
    before = handle.residuals([[1, 2]]).logits
    with pytest.raises(IndexError):
        handle.residuals([[1, handle.vocab_size]])
    ok = threading.Thread(target=lambda: handle.residuals([[1, 2]]))
    ok.start()
    ok.join(20)
    assert not ok.is_alive()
    assert torch.equal(handle.residuals([[1, 2]]).logits, before)


def test_two_threads_on_two_handles_of_one_module(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny.make("llama")
    handles = [Handle(model, tokenizer, name) for name in "ab"]
    assert handles[0].lock is handles[1].lock
    inputs = [torch.arange(9)[None] + 20 * n for n in range(2)]
    expected = [handles[0].residuals(ids) for ids in inputs]
    failures: list[Any] = []
    start = threading.Barrier(2)

    def work(n: int) -> None:
        start.wait()
        try:
            for _ in range(50):
                got = handles[n].residuals(inputs[n])
                if not torch.equal(got.states, expected[n].states) or not torch.equal(got.logits, expected[n].logits):
                    failures.append(n)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_encode_gives_what_the_model_gets(tokenizer: PreTrainedTokenizerFast) -> None:
    handle = Handle(tiny.make("llama"), tokenizer, "llama")
    text = "naïve 東京 👍🏽"
    ids = handle.encode(text)
    assert ids[0] == tokenizer.bos_token_id and ids.count(0) == 1  # BOS once
    assert ids[1:] == Handle(tiny.make("llama"), tiny.byte_level(bos=False), "bare").encode(text)
    assert b"".join(handle.pieces(ids)[1:]) == text.encode() and handle.lossless(text, ids)
    assert not handle.lossless(text, ids[:-1])
    spelled = "<|eos|> typed"
    assert handle.lossless(spelled, handle.encode(spelled))
    lower = tiny.byte_level()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    lossy = Handle(tiny.make("llama"), lower, "lossy")
    assert not lossy.lossless("Paris", lossy.encode("Paris")) and lossy.lossless("paris", lossy.encode("paris"))


def test_bad_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    handle = Handle(tiny.make("llama"), tokenizer, "llama")
    for text, sentence in [
        ("", "empty"),
        ("a\udc80b", "not valid text at character 1"),
        ("x" * 64, "65 tokens long; llama takes at most 64"),
    ]:
        with pytest.raises(PromptError, match=sentence):
            handle.encode(text)
    assert len(handle.encode("x" * 63)) == 64
    small = Handle(tiny.make("llama", vocab_size=100), tokenizer, "small")
    with pytest.raises(PromptError, match="only 100 rows: it is the tokenizer of another model"):
        small.encode("the river")
    blank = tiny.byte_level()
    blank.backend_tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(PromptError, match="makes no token of this prompt"):
        Handle(tiny.make("llama"), blank, "blank").encode("   ")


def test_single_token() -> None:
    handle = Handle(tiny.make("llama"), tiny.byte_level(), "tiny")
    the = single_token(handle, " the")
    assert handle.pieces([the], whole=False) == [b" the"]
    with pytest.raises(TargetError) as error:
        single_token(handle, "the")
    ids = handle.tokenizer("the", add_special_tokens=False)["input_ids"]
    assert all(f"{i} " in str(error.value) for i in ids)
    assert f"with a leading space it is one ({the})" in str(error.value)
    for text in ("", "a\udc80"):
        with pytest.raises(TargetError):
            single_token(handle, text)
    with pytest.raises(TargetError, match=r'"京都" is not one token for tiny but \d+ "'):
        single_token(handle, "京都")
    assert single_token(handle, "<|eos|>") == 1
    # A tokenizer that puts a space first means " the" by "the".
    llama2 = Handle(tiny.make("llama"), tiny.sentencepiece(prefix=True), "llama2")
    the = single_token(llama2, " the")
    assert llama2.pieces([the], whole=False) == [b" the"]
    with pytest.raises(TargetError, match="with a leading space it is one"):
        single_token(llama2, "the")


def test_close_frees_the_weights_and_refuses_further_use(tokenizer: PreTrainedTokenizerFast) -> None:
    handle = Handle(tiny.make("llama"), tokenizer, "llama")
    handle.residuals([[1, 2, 3]])
    module = weakref.ref(handle.model)
    weight = weakref.ref(handle.model.lm_head.weight)
    handle.close()
    assert module() is None and weight() is None
    for use in (lambda: handle.residuals([[1]]), lambda: handle.encode("a"), lambda: handle.model):
        with pytest.raises(LabError, match="llama was closed; open it again"):
            use()
    handle.close()


@pytest.mark.slow
def test_opening_and_closing_does_not_grow(checkpoint: Path, one_thread: None) -> None:
    def cycle() -> None:
        handle = open_model(str(checkpoint))
        handle.residuals([[1, 2, 3]])
        handle.close()  # collects garbage

    def tables() -> int:
        """Weights of this shape; other tests' session fixtures hold some."""
        return sum(issubclass(type(o), Tensor) and o.shape == (tiny.VOCAB, 32) for o in gc.get_objects())

    gc.collect()
    held = tables()
    cycle()
    cycle()
    before = len(gc.get_objects())
    for _ in range(20 if FULL else 8):
        cycle()
    assert len(gc.get_objects()) - before < 500  # one model alone is thousands of objects
    assert tables() == held


def test_the_fingerprint_is_of_the_weights(checkpoint: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    stored = open_model(str(checkpoint)).fingerprint
    assert len(stored) == 16 and int(stored, 16)
    assert stored == open_model(str(checkpoint), dtype="bfloat16").fingerprint
    model = tiny.make("llama")
    assert Handle(model, tokenizer, "in memory").fingerprint == stored
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[5, 5] += 1e-3
    assert Handle(model, tokenizer, "changed").fingerprint != stored
    theta = tiny.make("llama", rms_norm_eps=1e-3)  # same weights, another computation
    assert Handle(theta, tokenizer, "changed").fingerprint != stored


@pytest.mark.slow
def test_a_trace_survives_an_edit_of_its_source(tmp_path: Path) -> None:
    """nnsight compiles a trace from the file's text when it is first run, maybe long after the import."""
    shutil.copytree(ROOT / "models", tmp_path / "engram_lab" / "models")
    script = f"""
import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]
from pathlib import Path
from engram_lab.models import handle
assert Path(handle.__file__).parents[2] == Path({str(tmp_path)!r})
file = Path(handle.__file__)
file.write_text("import os\\n" * 7 + file.read_text())
from tests.models import tiny
h = handle.Handle(tiny.make("llama"), tiny.byte_level(), "llama")
print(h.residuals([[1, 2, 3]]).states.shape)
"""
    (tmp_path / "run.py").write_text(script)
    done = subprocess.run([sys.executable, str(tmp_path / "run.py")], capture_output=True, text=True)
    assert done.stdout.strip() == "torch.Size([4, 1, 3, 32])", done.stderr


@pytest.mark.slow
def test_the_trace_costs_little(tokenizer: PreTrainedTokenizerFast, one_thread: None) -> None:
    """What a trace of 8 layers adds, against 5 % of a forward of 256 tokens of a model as engram-mini.

    The cost does not depend on the width, so it is measured on a narrow model, where it stands out;
    processor time and the least of many runs leave out what else the machine does.
    """

    def build(width: int) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=8192, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=8,
            num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval()

    def least(runs: int, run: Callable[[], object]) -> float:
        times = []
        for _ in range(runs):
            start = time.thread_time()
            run()
            times.append(time.thread_time() - start)
        return min(times[2:])

    narrow, wide, ids = build(16), build(256), torch.arange(256)[None]
    handle = Handle(build(16), tokenizer, "timed")
    with handle.running():
        short = ids[:, :8]
        traced = least(40, lambda: handle.residuals(short))
        added = traced - least(40, lambda: narrow(input_ids=short, use_cache=False))
        forward = least(8, lambda: wide(input_ids=ids, use_cache=False))
    assert added < 0.05 * forward, (added, forward)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_row_of_nan_is_named_and_nothing_is_shown(family: str) -> None:
    """Validation runs a few ids; a damaged row of another token is met in a prompt, and is no number then."""
    handle = Handle(tiny.make(family), tiny.byte_level(), "damaged")
    ids = handle.encode("The river runs")
    with torch.no_grad():
        handle.model.get_input_embeddings().weight[ids[2]] = torch.nan
    piece = handle.pieces([ids[2]], whole=False)[0].decode()
    with pytest.raises(NotFiniteError, match=rf'damaged gives no numbers behind the token "{piece}" \(position 2\)'):
        handle.residuals([ids])
    with pytest.raises(NotFiniteError, match="position 2"):
        prefill(handle, ids)
    mask = torch.ones(1, len(ids), dtype=torch.int64)
    mask[0, 2:] = 0
    finite = torch.zeros(1, len(ids), 5)
    finite[0, 2:] = torch.inf
    assert handle.finite(finite, torch.tensor([ids]), mask) is finite, "padding is nobody's token"


def test_what_float16_cannot_hold_is_not_called_damaged() -> None:
    handle = Handle(tiny.make("llama").half(), tiny.byte_level(), "half")
    with torch.no_grad():
        handle.model.lm_head.weight.mul_(1e6)
    with pytest.raises(NotFiniteError, match="too large for float16: open it in bfloat16 or float32"):
        handle.residuals([handle.encode("The river runs past the old mill")])
