"""Plain text from the words of a tokenised corpus, with the characters of every word.

    detokenise(["He", "said", ",", "``", "Stop", "''", "."])
    text:  He said, "Stop".      spans: (0, 2) (3, 7) (7, 8) (9, 10) (10, 14) (14, 15) (15, 16)

No space before , . ; : ? ! ) ] or a closing quote, none after ( [ $ or an opening quote; `` and '' become " and the
backtick becomes '; a lone / joins its neighbours, and so does a lone - between numbers. A lone ' opens if none is open
and something other than punctuation follows, and closes otherwise.
Beware: a closing mark leans on the word before it, even where the sentence that it closes began in an earlier text.
"""

import re
from collections.abc import Sequence

_LEANS_BACK = {",", ".", ";", ":", "?", "!", ")", "]", "''"}
_LEANS_ON = {"(", "[", "``", "`", "$"}
_WRITTEN = {"``": '"', "''": '"', "`": "'"}


def detokenise(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """The text, and for each word its first character and the one after its last: `text[start:end]` is the word.

    (Quotes as they are written in the text.) Words are not empty and hold no spaces.
    """
    text, spans, is_glued, is_open = "", [], True, False
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else "."
        leans_back, leans_on = word in _LEANS_BACK, word in _LEANS_ON
        if word == "'":
            leans_on = not is_open and following not in _LEANS_BACK
            leans_back = not leans_on
            is_open = leans_on
        elif word == "/" or (word == "-" and place > 0 and _has_digit(words[place - 1]) and _has_digit(following)):
            leans_back = leans_on = True
        if not (is_glued or leans_back):
            text += " "
        written = _WRITTEN.get(word, word)
        spans.append((len(text), len(text) + len(written)))
        text += written
        is_glued = leans_on
    return text, spans


def _has_digit(word: str) -> bool:
    return re.search(r"\d", word) is not None
