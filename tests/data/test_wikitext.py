import pytest

from microtome.data.wikitext import plain_wikitext


@pytest.mark.parametrize(
    ("markup", "plain"),
    [
        (
            "The '''aardvark''' is a [[mammal|burrowing mammal]] of [[Africa]].",
            "The aardvark is a burrowing mammal of Africa.",
        ),
        ("One.&lt;ref name=a&gt;{{cite|x}}&lt;/ref&gt; Two.&lt;ref name=b /&gt;", "One. Two."),
        ("A {{outer|{{inner}}|b}}B", "A B"),
        ("{| class=x\n| cell {| y |}\n|}\nAfter.", "After."),
        ("Born ({{circa}}; {{lang}}) in [[Rome]] ({{date}}).", "Born in Rome."),
        ("Born ({{IPA}}; 1900) there.", "Born (1900) there."),
        ("== Life ==\nHe lived.\n* item\n: note\n== See also ==\n* more", "Life\n\nHe lived."),
        ("[[File:A.jpg|thumb|A [[cat]] asleep]]\nText.", "Text."),
        ("[[Category:Cats]][[de:Katze]]Text.", "Text."),
        ("Site [http://x.org the site] and [http://y.org].", "Site the site and."),
        ("H<sub>2</sub>O &amp;amp; more<!-- not\nthis -->", "H2O & more"),
        ("", ""),
    ],
)
def test_prose_remains_and_markup_goes(markup, plain):
    assert plain_wikitext(markup) == plain


def test_a_template_that_never_closes_takes_the_rest():
    assert plain_wikitext("Before. {{open [[x]]") == "Before."
