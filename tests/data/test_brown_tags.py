import pytest

from microtome.data.brown_tags import UNIVERSAL_TAGS, base_tag, universal_tag


@pytest.mark.parametrize(
    ("universal", "tags"),
    [
        ("VERB", "vb vbd-hl md md* bedz* do*-hl vb+ppo hvz vbg+to be-tl"),
        ("NOUN", "nn nn-tl nn$-tl-hl nns np$ nps nr nr$ nrs nn+bez np-nc"),
        ("PRON", "pps ppss+ber pp$ pp$$ pn$ wp$ wps+bez wpo ppls pp$-tl"),
        ("ADJ", "jj jjr-hl jjt jjs ap ap$ od-tl jjr+cs"),
        ("ADV", "rb rb$ rbr rn ql qlp wql wrb+dod * *-hl"),
        ("ADP", "in in-tl cs"),
        ("CONJ", "cc cc-tl"),
        ("DET", "at at-tl dt dt$ dti dts+bez dtx abn abx abl wdt+ber+pp ex+bez"),
        ("NUM", "cd cd$ cd-tl-hl"),
        ("PRT", "to rp rp+in to-hl"),
        ("X", "fw-nn fw-* fw-at+nn-tl fw-in+at-t uh nil"),
        (".", ". , : ( ) -- `` '' ' .-hl ,-nc (-hl :-tl ---hl"),
    ],
)
def test_every_kind_of_tag(universal, tags):
    assert universal in UNIVERSAL_TAGS
    assert {tag: universal_tag(tag) for tag in tags.split()} == dict.fromkeys(tags.split(), universal)


def test_upper_case_is_the_same():
    assert universal_tag("NN-TL") == "NOUN"
    assert base_tag("PPSS+BER-N") == "ppss"


@pytest.mark.parametrize("tag", ["", "xyz", "nnp", "fwnn", "+nn"])
def test_unknown_tags_have_no_label(tag):
    assert universal_tag(tag) is None
