import json
from dataclasses import replace

import pytest
import torch

from microtome.lenses.dictionaries.dictionary import Dictionary, require_shapes
from microtome.lenses.dictionaries.reading import load_dictionary

D, F, K = 6, 10, 3


def made(kind="topk", **changed):
    generator = torch.Generator().manual_seed(1)
    shapes = {"encoder": (D, F), "encoder_bias": (F,), "decoder": (F, D), "decoder_bias": (D,)}
    parts = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    fields = {"kind": kind, "site": "resid_post.3", "k": K if kind == "topk" else None}
    if kind in ("jumprelu", "batchtopk"):
        fields["threshold"] = torch.rand(F, generator=generator) if kind == "jumprelu" else torch.tensor(0.7)
    return Dictionary(**(parts | fields | changed))


@pytest.fixture
def x():
    return 2 * torch.randn(4, 5, D, generator=torch.Generator().manual_seed(2)) + 1


def one_token(it, u):
    """z of one token, feature by feature."""
    pre = [
        float(it.encoder_bias[f] + sum(u[c] * it.encoder[c, f] for c in range(it.width))) for f in range(it.features)
    ]
    if it.kind == "topk":
        chosen = sorted(range(it.features), key=lambda f: -pre[f])[: it.k]
    elif it.kind == "relu":
        chosen = range(it.features)
    else:
        chosen = [f for f in range(it.features) if pre[f] > it.threshold.expand(it.features)[f]]
    return torch.tensor([max(pre[f], 0.0) if f in set(chosen) else 0.0 for f in range(it.features)])


@pytest.mark.parametrize("kind", ["relu", "topk", "jumprelu", "batchtopk"])
@pytest.mark.parametrize("centred", [True, False])
def test_each_kind_is_its_formula(kind, centred, x):
    it = made(kind, centred=centred)
    z = it.encode(x)
    for row, token in zip(z.flatten(0, 1), x.flatten(0, 1), strict=True):
        expected = one_token(it, token - it.decoder_bias if centred else token)
        torch.testing.assert_close(row, expected)
        rebuilt = it.decoder_bias + sum(expected[f] * it.decoder[f] for f in range(F))
        torch.testing.assert_close(it(token[None])[0], rebuilt)
    assert (z == 0).any()
    assert (z > 0).any()


def test_a_topk_keeps_nothing_negative():
    it = made(encoder_bias=torch.full((F,), -100.0))
    assert it.encode(torch.randn(2, D)).count_nonzero() == 0


def test_normalisations_are_done_and_undone(x):
    plain = made("relu")
    scaled = made("relu", normalisation="scale", scale=0.25)
    torch.testing.assert_close(scaled.encode(x), plain.encode(0.25 * x))
    torch.testing.assert_close(scaled(x), plain(0.25 * x) / 0.25)
    torch.testing.assert_close(scaled.directions(), plain.decoder / 0.25)
    normed = made("relu", normalisation="layer_norm")
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True, correction=1)
    torch.testing.assert_close(normed(x), plain((x - mean) / (std + 1e-5)) * std + mean)
    length = x.square().sum(-1, keepdim=True).sqrt() / D**0.5
    torch.testing.assert_close(made("relu", normalisation="constant_norm")(x), plain(x / length) * length)
    with pytest.raises(ValueError, match="layer_norm of each token"):
        normed.decode(normed.encode(x))


def test_a_reconstruction_has_the_dtype_of_its_input(x):
    assert made()(x.bfloat16()).dtype == torch.bfloat16
    assert made().to(torch.float64)(x.double()).dtype == torch.float64


def test_directions_are_rows_of_the_decoder():
    it = replace(made(), decoder=torch.cat([torch.zeros(1, D), made().decoder[1:]]))
    assert torch.equal(it.directions(), it.decoder)
    lengths = it.directions(unit=True).norm(dim=1)
    torch.testing.assert_close(lengths, torch.tensor([0.0] + [1.0] * (F - 1)))
    frame = it.to_frame()
    assert list(frame["decoder_norm"]) == pytest.approx(it.decoder.double().norm(dim=1).tolist())
    assert frame["threshold"].isna().all()


def test_another_site_or_width_is_refused(x):
    it = made(model="tiny")
    it.require_site("resid_post.3")
    it.require_site("blocks.4.hook_resid_pre")
    it.require_width(D)
    with pytest.raises(ValueError, match=r"is of resid_post\.3 \(tiny\), and is asked for at resid_post\.4"):
        it.require_site("resid_post.4")
    with pytest.raises(ValueError, match="directions of 6 channels, and 8 are given"):
        it.require_width(8)
    with pytest.raises(ValueError, match="6 channels, and 5"):
        it.encode(x[..., :5])
    with pytest.raises(ValueError, match="z has 4 features"):
        it.decode(x[..., :4])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k": None}, "needs a k from 1"),
        ({"k": F + 1}, "needs a k from 1"),
        ({"kind": "gated"}, "kind is 'gated'"),
        ({"kind": "jumprelu", "threshold": None}, "needs a threshold"),
        ({"threshold": torch.zeros(F)}, "topk dictionary has no threshold"),
        ({"decoder_bias": torch.full((D,), torch.nan)}, "decoder_bias of the dictionary of .* NaN"),
        ({"kind": "jumprelu", "threshold": torch.zeros(D)}, "expected one number, or 10"),
        ({"normalisation": "scale"}, "needs a positive factor"),
        ({"scale": 2.0}, "needs a positive factor, others none"),
        ({"normalisation": "batch"}, "normalisation is 'batch'"),
        ({"site": "resid.3"}, "No kind of site"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        made(**changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"decoder": torch.zeros(F, D + 1)}, r"goes with a decoder \(10, 6\), got \(10, 7\)"),
        ({"encoder_bias": torch.zeros(D)}, r"goes with a encoder_bias \(10,\)"),
        ({"encoder": torch.zeros(D)}, r"encoder is \(6,\)"),
        ({"encoder": torch.zeros(D, 0)}, r"encoder is \(6, 0\): there is no feature"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        require_shapes(made().tensors | changed)


@pytest.mark.parametrize("kind", ["relu", "topk", "jumprelu", "batchtopk"])
def test_save_and_load_give_the_same(kind, x, tmp_path):
    it = made(kind, normalisation="scale", scale=0.5, model="tiny", facts={"tokens": 7})
    it.save(tmp_path / "one")
    for found in (Dictionary.load(tmp_path / "one"), load_dictionary(tmp_path / "one", "resid_post.3")):
        assert torch.equal(found(x), it(x))
        assert (found.site, found.model, found.facts) == ("resid_post.3", "tiny", {"tokens": 7})
    with pytest.raises(ValueError, match=r"is asked for at resid_post\.5"):
        load_dictionary(tmp_path / "one", "resid_post.5")


def test_a_token_of_zeros_is_rebuilt_as_zeros():
    it = made("relu", normalisation="constant_norm", encoder_bias=torch.ones(F))
    assert torch.equal(it(torch.zeros(2, D)), torch.zeros(2, D))


@pytest.mark.parametrize(
    "changed", [{"more": 1}, {"site": 5}, {"site": None}, {"facts": [1]}, {"k": "3"}, {"kind": ...}]
)
def test_facts_of_another_type_and_missing_ones_are_refused(changed, tmp_path):
    made().save(tmp_path)
    facts = json.loads((tmp_path / "dictionary.json").read_text()) | changed
    given = {name: value for name, value in facts.items() if value is not ...}
    (tmp_path / "dictionary.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match=r"is missing in .*, or unknown, or of another type"):
        Dictionary.load(tmp_path)


def test_damaged_and_missing_files_are_refused(tmp_path):
    made().save(tmp_path)
    facts = json.loads((tmp_path / "dictionary.json").read_text())
    other = tmp_path / "other"
    replace(made(), decoder_bias=torch.ones(D)).save(other)
    (other / "dictionary.safetensors").rename(tmp_path / "dictionary.safetensors")
    with pytest.raises(ValueError, match="of another save"):
        Dictionary.load(tmp_path)
    (tmp_path / "dictionary.json").write_text(json.dumps(facts | {"format": 9}))
    with pytest.raises(ValueError, match="format 9"):
        Dictionary.load(tmp_path)
    (tmp_path / "dictionary.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        Dictionary.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no .*dictionary\.safetensors"):
        Dictionary.load(other)
    with pytest.raises(TypeError):
        made(facts={"model": object()}).save(tmp_path / "never")
    assert not (tmp_path / "never").exists()
