"""Plain text from the markup of MediaWiki: prose paragraphs and headings, without tables, templates and references.

    plain_wikitext("The '''aardvark''' is a [[mammal|burrowing mammal]].<ref>{{cite}}</ref>")

A reader for training text, not a renderer: what a template would print (dates, units, quotations) is lost, so that a
sentence may have a gap; brackets that this leaves empty are removed. List items, captions and galleries are left out.
"""

import html
import re

_ELEMENTS = ("ref", "gallery", "math", "table", "timeline", "imagemap", "code", "source", "score", "div", "pre")
_LINK = re.compile(r"\[\[([^\[\]|]*)(?:\|([^\[\]]*))?\]\]")
_END_SECTIONS = re.compile(
    r"\n==\s*(?:See also|References|Notes|Notes and references|Footnotes|External links|Further reading|Bibliography|"
    r"Sources|Citations|Gallery)\s*==.*",
    flags=re.DOTALL | re.IGNORECASE,
)


def plain_wikitext(markup: str) -> str:
    """Headings and paragraphs of an article, apart by empty lines; what follows "See also" or "References" is cut."""
    text = html.unescape(html.unescape(markup))
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = _END_SECTIONS.sub("", text)
    text = re.sub(r"<ref\b[^>]*/>", "", text)
    for name in _ELEMENTS:
        text = re.sub(rf"<{name}\b[^>]*>.*?</{name}\s*>", "", text, flags=re.DOTALL | re.IGNORECASE)
    text = _without_nested(text, "{|", "|}")
    text = _without_nested(text, "{{", "}}")
    text = _without_links(text)
    text = re.sub(r"</?\w+[^<>]*>", "", text)
    text = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", text)
    text = re.sub(r"\[?https?://\S+", "", text)
    text = re.sub(r"'{2,}|__[A-Z]+__", "", text)
    text = re.sub(r"\(\s*[;,:]\s*", "(", text)
    text = re.sub(r" *\(\s*[;,.]*\s*\)", "", text)
    text = re.sub(r"[ \t\xa0]+", " ", text)
    lines = [line.strip() for line in text.split("\n")]
    # a caption whose brackets do not match stays behind as "thumb|..."
    kept = [_heading(line) for line in lines if line and line[0] not in "*#:;|!{}" and "|" not in line]
    return "\n\n".join(re.sub(r" +([,.;])", r"\1", line) for line in kept if line)


def _heading(line: str) -> str:
    match = re.fullmatch(r"(={2,6})\s*(.*?)\s*\1", line)
    return match[2] if match else line


def _without_nested(text: str, opening: str, closing: str) -> str:
    """The text outside all pairs of brackets; a bracket without its partner ends with its paragraph."""
    kept, depth, start = [], 0, 0
    for match in re.finditer(f"{re.escape(opening)}|{re.escape(closing)}", text):
        if match[0] == opening:
            if depth == 0:
                kept.append(text[start : match.start()])
            depth += 1
        elif depth:
            depth -= 1
            if depth == 0:
                start = match.end()
    return "".join(kept) + (text[start:] if depth == 0 else "")


def _without_links(text: str) -> str:
    """Links become their label; files, categories and other languages go, captions with links inside included."""

    def label(match: re.Match) -> str:
        target, shown = match[1], match[2]
        if re.match(r"\s*(?:File|Image|Category|Media|Wikipedia|[a-z]{2,3}):", target, flags=re.IGNORECASE):
            return ""
        return (shown if shown is not None else target.lstrip(":")).split("|")[-1]

    before = None
    while before != text:
        before, text = text, _LINK.sub(label, text)
    return text
