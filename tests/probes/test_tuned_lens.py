"""The tuned lens: at zero the logit lens, against closed forms, autograd and transformers; its files; its fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engram_lab.models import listing, loading
from engram_lab.models.errors import CheckpointError, DataError, LabError
from engram_lab.models.handle import Handle
from engram_lab.probes import tuned_lens
from engram_lab.probes.base import Report
from engram_lab.probes.fit_text import FitText, line_digests, read_text, windows_of
from engram_lab.probes.lens import LensConfig, run
from engram_lab.probes.lens_math import lens_statistics
from engram_lab.probes.tuned_lens import Fit, FitConfig, FitInfo, NoTranslatorsError, Translators
from tests.models import tiny
from tests.probes.test_lens import PROMPTS, reference

SMALL = FitConfig(steps=6, tokens=2000, seed=3)


@pytest.fixture(scope="module")
def pair() -> list[Handle]:
    """A tiny Engram and a tiny Llama with one tokenizer, which puts BOS first."""
    tokenizer = tiny.byte_level()
    return [Handle(tiny.engram(tokenizer), tokenizer, "memory"), Handle(tiny.make("llama"), tokenizer, "dense")]


@pytest.fixture
def text() -> FitText:
    """Documents of made-up words, and held-out ones of the same."""
    rng = np.random.default_rng(0)
    words = [" ".join(f"w{i}" for i in rng.integers(0, 60, 25)) for _ in range(60)]
    return FitText(("words.txt",), tuple(words[:50]), tuple(words[50:]))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the lab for this test alone."""
    monkeypatch.setenv("ENGRAM_LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def translators(handle: Handle, scale: float = 0.0, seed: int = 0, lines: tuple[str, ...] = ()) -> Translators:
    """Random translators of a model, zero by default."""
    generator = torch.Generator().manual_seed(seed)
    n, d = handle.n_layers, handle.d_model
    info = FitInfo(handle.fingerprint, FitConfig(), ("a.txt",), "0" * 16, 9, 1, 1, 1, np.zeros(n), np.zeros(n))
    weight, bias = (scale * torch.randn(shape, generator=generator) for shape in ((n, d, d), (n, d)))
    return Translators(weight, bias, info, line_digests(lines))


def store(handle: Handle, made: Translators) -> Path:
    path = tuned_lens.places(handle)[0]
    tuned_lens.save(made, path)
    return path


def request(handles: list[Handle], **options: Any) -> LensConfig:
    return LensConfig(tuple(h.name for h in handles), PROMPTS, tuned=True, bootstrap=40, **options)


def test_zero_translators_are_the_logit_lens_bit_for_bit(pair: list[Handle]) -> None:
    for handle in pair:
        store(handle, translators(handle))
    result = run(pair, request(pair, target=" the", top_k=3)).result
    for lens in result.models:
        for item in dataclasses.fields(lens.tuned):
            if item.name not in ("fit", "prompts_in_fit"):
                a, b = getattr(lens, item.name), getattr(lens.tuned, item.name)
                assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, item.name
    assert np.array_equal(result.difference.tuned_mean_kl, result.difference.mean_kl)
    assert result.difference.tuned_settle_depth_low == result.difference.settle_depth_low


@pytest.mark.parametrize("half", [False, True])
def test_translators_keep_dtype_and_last_layer(half: bool) -> None:
    model = tiny.make("llama")
    handle = Handle(model.bfloat16() if half else model, tiny.byte_level(), "dense")
    states = torch.randn(4, 5, handle.d_model, dtype=handle.dtype)
    assert torch.equal(translators(handle).apply(states), states)
    moved = translators(handle, 0.1).apply(states)
    assert moved.dtype == handle.dtype and torch.equal(moved[-1], states[-1])
    assert not torch.equal(moved[0], states[0])


def test_figures_against_transformers_by_hand(pair: list[Handle]) -> None:
    for n, handle in enumerate(pair):
        store(handle, translators(handle, 0.2, n))
    report = run(pair, request(pair, target=" the", top_k=2))
    assert Report.from_dict(json.loads(report.to_json())) == report
    assert run(pair, request(pair, target=" the", top_k=2)).to_json() == report.to_json()
    for n, handle in enumerate(pair):
        lens, made = report.result.models[n], translators(handle, 0.2, n)
        for i, prompt in enumerate(PROMPTS):
            at = np.flatnonzero(lens.prompt_index == i)
            ids = handle.tokenizer(prompt)["input_ids"]
            with torch.inference_mode():
                out = handle.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
                moved = [
                    h[0] + h[0] @ a.T + b
                    for h, a, b in zip(out.hidden_states[:-1], made.weight, made.bias, strict=True)
                ]
                logits = [handle.model.lm_head(handle.model.model.norm(h)) for h in moved]
                log_p = torch.stack([*logits, out.logits[0]]).double().log_softmax(-1).numpy()
            p, final = np.exp(log_p), log_p[-1]
            kl = (np.exp(final) * (final - log_p)).sum(-1)
            np.testing.assert_allclose(lens.tuned.kl[:, at], kl, atol=3e-5)
            np.testing.assert_allclose(lens.tuned.entropy[:, at], -(p * log_p).sum(-1), atol=3e-5)
            np.testing.assert_allclose(lens.tuned.target_prob[:, at], p[..., lens.target_id], atol=1e-6)
            plain = reference(handle, ids)
            final_entropy = -(p[-1] * final).sum(-1)
            np.testing.assert_allclose(lens.entropy[-1, at], final_entropy, atol=3e-5)
            assert plain.shape == log_p.shape
        kept = lens.counted
        np.testing.assert_allclose(lens.tuned.mean_kl, lens.tuned.kl[:, kept].astype(float).mean(1), rtol=1e-12)
        assert lens.mean_final_entropy == pytest.approx(lens.entropy[-1, kept].astype(float).mean())
        assert lens.mean_final_entropy_low < lens.mean_final_entropy < lens.mean_final_entropy_high
    a, b = report.result.models
    both = a.counted & b.counted
    gap = (a.tuned.kl[:, both].astype(float) - b.tuned.kl[:, both]).mean(1)
    np.testing.assert_allclose(report.result.difference.tuned_mean_kl, gap, atol=1e-12)
    assert report.result.difference.final_entropy == pytest.approx(a.mean_final_entropy - b.mean_final_entropy)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_gradients_are_those_of_autograd(family: str, text: FitText) -> None:
    """Against the KL written out and differentiated as a whole, for heads with and without a soft cap."""
    handle = Handle(tiny.make(family), tiny.byte_level(), family)
    fit = Fit(handle, text, SMALL)
    with torch.no_grad():
        for own in [*fit.weight, fit.bias]:
            own.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    with handle.running():
        states, logits = fit.forward(fit.batch(0))
        losses, gradients = fit.gradients(states[:-1].float(), logits.float())
    states, final = states.clone(), logits.clone().log_softmax(-1)
    expected = []
    for n in range(handle.n_layers):
        centred = (states[n] - fit.mean[n]) / fit.scale[n]
        moved = states[n] + fit.scale[n] * (centred @ fit.weight[n].T + fit.bias[n])
        log_q = handle.unembed(moved).log_softmax(-1)
        expected.append(torch.nn.functional.kl_div(log_q, final, log_target=True, reduction="batchmean"))
    assert losses == pytest.approx([loss.item() for loss in expected], rel=1e-4)
    wanted = torch.autograd.grad(sum(expected), [*fit.weight, fit.bias])
    for own, reference_ in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(own, reference_, rtol=1e-3, atol=1e-7)
    assert all(p.grad is None for p in handle.model.parameters()), "the model is left alone"
    # What is written is the same map, on the states themselves.
    weight, bias = fit.translators()
    states = states[:-1]
    with torch.no_grad():
        inside = [
            fit.scale[n] * ((s - fit.mean[n]) / fit.scale[n] @ fit.weight[n].T + fit.bias[n])
            for n, s in enumerate(states)
        ]
    torch.testing.assert_close(states @ weight.mT + bias[:, None], torch.stack(inside), rtol=1e-3, atol=1e-5)


class Images(Fit):
    """A fit in which every layer's state is an affine image of the last one: there is a translator without loss."""

    def forward(self, windows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        states, logits = super().forward(windows)
        generator = torch.Generator().manual_seed(5)
        images = []
        for _ in range(self.handle.n_layers):
            rotation = torch.linalg.qr(torch.randn(states.shape[-1], states.shape[-1], generator=generator))[0]
            shift = 0.05 * torch.randn(states.shape[-1], generator=generator)
            images.append(3 * states[-1] @ rotation.T + shift)
        return torch.stack([*images, states[-1]]), logits


@pytest.mark.slow
def test_affine_images_of_the_last_layer_are_recovered(text: FitText) -> None:
    """The logit lens is far off on such a model; the translator in closed form is the inverse map less the identity."""
    handle = Handle(tiny.make("llama"), tiny.byte_level(), "dense")
    with torch.no_grad():
        handle.model.lm_head.weight.mul_(20)  # a random head tells tokens apart too little for a KL to matter
    fit = Images(handle, text, FitConfig(steps=300, tokens=4000))
    while not fit.done:
        fit.step()
    info = fit.result().info
    assert (info.logit_kl > 0.5).all(), info.logit_kl
    assert (info.tuned_kl < 0.1 * info.logit_kl).all(), (info.logit_kl, info.tuned_kl)


def test_a_fit_lowers_the_held_out_kl(pair: list[Handle], text: FitText) -> None:
    handle = pair[1]
    made = tuned_lens.fit(handle, text, FitConfig(steps=60, tokens=2000))
    assert (made.info.tuned_kl < made.info.logit_kl).all()
    # The figures anew: padding and the leading BOS left out, one document at a time.
    kl: list[list[torch.Tensor]] = [[], []]
    with handle.running():
        for window in windows_of(handle, text.held_out, 64, tuned_lens.HELD_OUT * 64):
            states = handle.residuals([window]).states[:, 0]
            for n, own in enumerate((states, made.apply(states))):
                kl[n].append(lens_statistics(own, handle.unembed).kl[:-1, int(window[0] == 0) :])
    for own, told in zip(kl, (made.info.logit_kl, made.info.tuned_kl), strict=True):
        np.testing.assert_allclose(torch.cat(own, 1).double().mean(1), told, rtol=1e-4)
    assert made.info.held_out_positions == torch.cat(kl[0], 1).shape[1]
    assert made.info.documents == 50 and made.info.tokens <= 2000


def test_resuming_gives_the_weights_of_an_uninterrupted_fit(pair: list[Handle], text: FitText, tmp_path: Path) -> None:
    whole = tuned_lens.fit(pair[0], text, SMALL)
    file = tmp_path / "fit"

    def stop(step: int, losses: list[float]) -> None:
        if step in (1, 4):
            raise KeyboardInterrupt

    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            tuned_lens.fit(pair[0], text, SMALL, file, resume, stop)
    again = tuned_lens.fit(pair[0], text, SMALL, file, True)
    assert torch.equal(again.weight, whole.weight) and torch.equal(again.bias, whole.bias)
    assert again.info == whole.info and whole.weight.abs().max() > 0
    other = tuned_lens.fit(pair[0], text, dataclasses.replace(SMALL, seed=4))
    assert not torch.equal(other.weight, whole.weight)
    for handle, config in ((pair[0], dataclasses.replace(SMALL, seed=4)), (pair[1], SMALL)):
        with pytest.raises(CheckpointError, match="another model, text or setting"):
            tuned_lens.fit(handle, text, config, file, True)
    with pytest.raises(CheckpointError, match="no fit to resume"):
        tuned_lens.fit(pair[0], text, SMALL, tmp_path / "none", True)


def test_a_file_gives_back_what_was_saved(pair: list[Handle]) -> None:
    made = translators(pair[0], 0.3, lines=("The river runs past the old mill", "b"))
    store(pair[0], made)
    read = tuned_lens.open_translators(pair[0])
    assert torch.equal(read.weight, made.weight) and torch.equal(read.bias, made.bias) and read.info == made.info
    assert read.seen(PROMPTS) == 1 and read.seen(("b", "x")) == 1 and read.seen(("x",)) == 0
    assert run(pair[:1], request(pair[:1])).result.models[0].tuned.prompts_in_fit == 1


def test_the_users_own_translators_go_before_those_beside_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny.make("llama"), tiny.byte_level()
    folder = tmp_path / "models" / "mine"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(listing, "SHIPPED", tmp_path / "models")
    fingerprints = []
    for name in ("mine", str(folder)):
        loaded = loading.load(loading.resolve(name), torch.device("cpu"), None, False)
        handle = Handle(loaded.model, loaded.tokenizer, name, loaded.fingerprint)
        fingerprints.append(handle.fingerprint)
        assert tuned_lens.places(handle)[1:] == [folder / tuned_lens.FILE]
        if name == "mine":
            assert tuned_lens.find(handle) is None
            tuned_lens.save(translators(handle), folder / tuned_lens.FILE)
        assert tuned_lens.find(handle) == folder / tuned_lens.FILE
    assert fingerprints[0] == fingerprints[1], "translators beside the weights are no part of them"
    own = store(handle, translators(handle, 0.1))
    assert tuned_lens.find(handle) == own


def test_files_that_do_not_fit_are_one_sentence(pair: list[Handle]) -> None:
    with pytest.raises(NoTranslatorsError, match="engram-lab lens fit --model memory --text FILE"):
        run(pair, request(pair))
    path = store(pair[0], translators(pair[1]))
    with pytest.raises(CheckpointError, match=f"has {pair[0].fingerprint}: fit it anew") as caught:
        run(pair[:1], request(pair[:1]))
    assert "\n" not in str(caught.value)
    made = translators(pair[0])
    for broken, words in (
        (dataclasses.replace(made, weight=made.weight[:, :-1]), "shape"),
        (dataclasses.replace(made, bias=made.bias[:-1]), "shape"),
        (dataclasses.replace(made, bias=made.bias / 0), "not finite"),
    ):
        tuned_lens.save(broken, path)
        with pytest.raises(CheckpointError, match=words):
            tuned_lens.open_translators(pair[0])
    save_file(load_file(path), path)  # without what it is
    with pytest.raises(CheckpointError, match="is not a tuned lens"):
        tuned_lens.open_translators(pair[0])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="is not a tuned lens"):
        tuned_lens.open_translators(pair[0])


def test_held_out_documents_are_left_out_of_the_fit(tmp_path: Path) -> None:
    from engram_lab.models.data import is_held_out

    texts = [f"document {n}\nof two lines" for n in range(1500)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    read = read_text([tmp_path / "a.txt"], 1000, max_characters=40)
    assert set(read.held_out) == {t for t in texts if is_held_out(t)} and read.held_out
    assert set(read.fit) <= set(texts) - set(read.held_out)
    assert 8000 <= sum(map(len, read.fit)) < 8100, "8 characters a token, no more are kept"
    assert read == read_text([tmp_path / "a.txt"], 1000, max_characters=40)
    places = sorted(texts.index(t) for t in read.fit)
    assert places[0] < 50 and places[-1] > 1450, "from all over the file"
    assert read_text([tmp_path / "a.txt"], 1000, seed=1).fit != read.fit


def test_windows_cover_the_documents_once(pair: list[Handle], text: FitText) -> None:
    windows = windows_of(pair[0], text.fit[:3], 10, 10**6)
    ids = [i for document in text.fit[:3] for i in pair[0].tokenizer(document)["input_ids"]]
    assert [i for window in windows for i in window] == ids and max(map(len, windows)) == 10
    few = windows_of(pair[0], text.fit, 10, 57)
    assert sum(map(len, few)) == 57 and [i for window in few for i in window] == ids[:57]


@pytest.mark.parametrize("change", [{"steps": 0}, {"tokens": 0}, {"max_characters": 0}, {"seed": -1}])
def test_settings_that_make_no_sense_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(LabError):
        FitConfig(**change)


def test_a_text_without_held_out_documents_is_refused(pair: list[Handle], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no held-out document"):
        Fit(pair[0], FitText(("a.txt",), ("one", "two"), ()), SMALL)
    with pytest.raises(DataError, match="There is no text file"):
        read_text([tmp_path / "none.txt"], 10)
