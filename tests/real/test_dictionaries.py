"""A TopK dictionary of SmolLM2, trained on a few thousand tokens: better than where it began, on other texts."""

import pytest

from microtome.capture.models import load_model
from microtome.data.plain_english import plain_english
from microtome.lenses.dictionaries.reading import load_dictionary
from microtome.lenses.dictionaries.report import dictionary_report
from microtome.lenses.dictionaries.training import DictionarySettings, train_dictionary
from microtome.lenses.token_windows import token_windows

SITE = "resid_post.14"


@pytest.mark.slow
@pytest.mark.network
def test_a_dictionary_of_a_real_model(tmp_path):
    model = load_model("smollm2")
    table = plain_english(["brown"], characters=40_000, passage=1000)
    windows = token_windows(model, table["text"], documents=table["document"].tolist(), length=128)
    names = sorted(set(windows.documents))
    other = set(names[: len(names) // 8])
    fit = [text for text, name in zip(windows.texts, windows.documents, strict=True) if name not in other]
    kept = [(text, name) for text, name in zip(windows.texts, windows.documents, strict=True) if name in other]
    settings = DictionarySettings(steps=150, batch=512, evaluate_every=50, dead_after=20_000, held_out_share=0.0)
    found = train_dictionary(model, fit, SITE, features=1152, k=32, settings=settings, progress=False)
    found.save(tmp_path)
    texts, documents = [text for text, _ in kept], [name for _, name in kept]
    rows = dictionary_report(model, found, texts, documents=documents).table.set_index("reconstruction")
    dictionary = rows.loc["dictionary"]
    assert dictionary["explained"] > 0.55
    assert dictionary["loss_recovered"] > 0.85
    assert dictionary["dead"] < 0.05
    for control in ("pca", "untrained", "mean"):
        assert dictionary["explained"] > rows.loc[control, "explained"] + 0.05
        assert dictionary["loss_recovered"] > rows.loc[control, "loss_recovered"] + 0.02
    assert load_dictionary(tmp_path, SITE).features == 1152
