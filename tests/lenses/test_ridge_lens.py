import pytest
import torch

from microtome.capture import Site, taps
from microtome.lenses.lens import logit_lens_of
from microtome.lenses.lens_statistics import lens_statistics
from microtome.lenses.linear_map import identity_map
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.ridge_lens import ridge_to_last, translated_lens
from microtome.lenses.shortcuts import fit_shortcuts
from microtome.lenses.tuned_training import TunedSettings, fit_tuned_lens


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 120, (12,), generator=generator).tolist() for _ in range(40)]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_maps_are_least_squares_where_there_is_no_penalty(kind, tiny, texts):
    model = tiny(kind)
    shards = ["fit"] * 30 + ["validation"] * 10
    maps = ridge_to_last(model, texts, strengths=[0.0], shards=shards, depths=[1])
    assert list(maps) == ["resid_post.0"]
    x, y = [], []
    for text in texts[:30]:
        with taps(model, ["resid_post.0", "resid_post.2"]) as tape, torch.no_grad():
            model(torch.tensor([text]))
        x.append(tape["resid_post.0"][0, 1:])
        y.append(tape["resid_post.2"][0, 1:])
    x, y = torch.cat(x).double(), torch.cat(y).double()
    design = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    expected = torch.linalg.lstsq(design, y).solution
    torch.testing.assert_close(maps["resid_post.0"].weight, expected[:-1], rtol=1e-3, atol=1e-4)


def test_the_ridge_lens_is_nearer_the_model_than_the_logit_lens(tiny, texts):
    model = tiny("gemma2")
    maps = ridge_to_last(model, texts[:30])
    found = lens_statistics(model, texts[30:], [logit_lens_of(model), translated_lens(model, maps)])
    logit, ridge = (found[name].curve()["kl"] for name in ("logit", "ridge"))
    assert (ridge[:2] < logit[:2]).all()
    assert ridge.iloc[-1] < 1e-6


def test_what_does_not_fit_is_refused(tiny, texts):
    model = tiny("llama")
    with pytest.raises(ValueError, match="depths 0 to 2"):
        ridge_to_last(model, texts, depths=[3])
    with pytest.raises(ValueError, match="no depth before the last"):
        translated_lens(model, {"resid_post.2": identity_map(32)})
    with pytest.raises(ValueError, match=r"ends at resid_post.1, and the unembedding reads resid_post.2"):
        translated_lens(model, {"resid_pre.0": identity_map(32, "resid_pre.0", "resid_post.1")})
    with pytest.raises(ValueError, match="31 to 31"):
        translated_lens(model, {"resid_post.0": identity_map(31)})


def test_shortcuts_are_taken_as_they_come_by_lens_and_training(tiny, texts):
    model = tiny("llama")
    shards = ["fit"] * 20 + ["validation"] * 6 + ["test"] * 4
    moments = moments_of(model, texts[:30], ["resid_pre.0", "resid_post.0", "resid_post.2"], shards=shards)
    maps = fit_shortcuts(moments).translators()
    assert [str(site) for site in translated_lens(model, maps).sites] == ["resid_pre.0", "resid_post.0", "resid_post.2"]
    settings = TunedSettings(steps=1, tokens=8, rate=0.0, weight_decay=0.0)
    tuned = fit_tuned_lens(model, texts[:30], depths=[0, 1], start=maps, settings=settings)
    torch.testing.assert_close(tuned.maps()["resid_post.0"].weight, maps[Site("resid_post", 0)].weight)
