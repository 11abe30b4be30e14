"""Plain text wrapped at widths from 15 to 150 characters: what does a model know of the length of a line?

Source: the sentences of the Brown corpus (`brown`), fetched on first use. Each document is cut into passages of 800
characters or a little more, at ends of sentences; each passage is wrapped with `textwrap` at a width of its own. After
Gurnee et al. (2025), "When Models Manipulate Manifolds: The Geometry of a Counting Task", Transformer Circuits, who
wrap prose at widths 15 to 150 and find the count of characters, and what is left of the line, in the residual stream.

Widths are dealt out so that each occurs equally often (up to one passage), at random over documents: the text does not
tell the width. The last line of a passage, which nothing ended, is cut off. Groups are documents.
Token labels (`computed_labels`): characters since the last newline, characters to the end of the line, token length.
Beware: a word longer than the width stands alone on a line that is too long (of the lines at width 15, one in 270; from
25 on, none); in one passage of six no line fills the width to the last character.
"""

import textwrap

import numpy as np
import pandas as pd

from microtome.data.brown import brown_sentences

WIDTHS = range(15, 151)
PASSAGE_CHARACTERS = 800


def lines(*, seed: int = 0) -> pd.DataFrame:
    """The wrapped passages in the corpus' order: text (str), group (str, the document), genre (str), width (int).

    seed: decides which passage has which width. Raises what `fetch` raises.
    """
    sentences = brown_sentences(repeated=True)
    rows = []
    for (document, genre), texts in sentences.groupby(["group", "genre"], sort=False)["text"]:
        rows += [(passage, document, genre) for passage in passages(texts.tolist())]
    table = pd.DataFrame(rows, columns=["text", "group", "genre"])
    widths = np.random.default_rng(seed).permutation(np.arange(len(table)) % len(WIDTHS) + WIDTHS[0])
    table["text"] = [wrapped(text, int(width)) for text, width in zip(table["text"], widths, strict=True)]
    table["width"] = widths
    return table


def passages(sentences: list[str]) -> list[str]:
    """Successive sentences joined by spaces until PASSAGE_CHARACTERS are reached; a shorter rest is left out."""
    found, part = [], ""
    for sentence in sentences:
        part = f"{part} {sentence}" if part else sentence
        if len(part) >= PASSAGE_CHARACTERS:
            found.append(part)
            part = ""
    return found


def wrapped(text: str, width: int) -> str:
    """The text's full lines at that width: broken at spaces only, without the last line."""
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)[:-1])
