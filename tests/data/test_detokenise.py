import pytest

from microtome.data.detokenise import detokenise


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("He said , `` Stop '' .", 'He said, "Stop".'),
        ("`` Why ? '' she asked ; he left !", '"Why?" she asked; he left!'),
        ("( see p. 4 ) : [ Hearst ]", "(see p. 4): [Hearst]"),
        ("the ' other ' one", "the 'other' one"),
        ("he said , ' Go '", "he said, 'Go'"),
        ("meets change '", "meets change'"),
        ("the word ` news ?", "the word 'news?"),
        ("5 - 10 lb. / cu. ft. of $ 5 - notes", "5-10 lb./cu. ft. of $5 - notes"),
        ("C. & O. - B. & O. -- he's O.K.", "C. & O. - B. & O. -- he's O.K."),
        ("'' . '' he", '"." he'),
        ("don't Mary's half-way 1/2''", "don't Mary's half-way 1/2''"),
        ("", ""),
    ],
)
def test_text_and_spans(words, text):
    words = words.split()
    found, spans = detokenise(words)
    assert found == text
    assert len(spans) == len(words)
    for word, (start, end) in zip(words, spans, strict=True):
        assert found[start:end] == {"``": '"', "''": '"', "`": "'"}.get(word, word)
    # every character outside the words is a space
    outside = set(range(len(found))) - {place for start, end in spans for place in range(start, end)}
    assert {found[place] for place in outside} <= {" "}
