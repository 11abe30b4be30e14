"""A small generated sentiment set, for unit tests and quick starts: no download, no file.

    text = template with a noun and an adjective filled in;   label = whether the adjective is positive

The label is a function of the adjective alone, so `group` is the adjective: a split by rows would ask a probe about
words it was fitted on, and score near 1 on any model. Every template takes every noun and every adjective, and each
occurs as often with a positive as with a negative one, so that neither tells the label.
Beware: forty adjectives are too few to say anything about a model. Use it to try the calls; measure on real text.
"""

import numpy as np
import pandas as pd

# fmt: off
_POSITIVE = (
    "wonderful", "excellent", "delightful", "brilliant", "superb",
    "charming", "lovely", "great", "pleasant", "amazing",
    "fantastic", "beautiful", "enjoyable", "perfect", "impressive",
    "marvellous", "splendid", "terrific", "graceful", "fine",
)
_NEGATIVE = (
    "terrible", "awful", "dreadful", "horrible", "boring",
    "dull", "ugly", "bad", "unpleasant", "disappointing",
    "miserable", "nasty", "annoying", "poor", "lousy",
    "pathetic", "tedious", "ghastly", "clumsy", "weak",
)
# fmt: on
_TEMPLATES = (
    "The {noun} was {adjective}.",
    "I thought the {noun} was {adjective}.",
    "What a {adjective} {noun} that was!",
    "Everyone said it was a {adjective} {noun}.",
    "My sister called the {noun} {adjective} from start to end.",
    "It was, to be honest, a really {adjective} {noun}.",
)
_NOUNS = ("film", "meal", "hotel", "book", "concert", "garden")


def toy_sentiment(rows: int = 200, *, seed: int = 0) -> pd.DataFrame:
    """`rows` different sentences, half of them positive, in random order.

    Columns: text (str), label (bool, True for a positive adjective), group (str, the adjective), template (int), noun
    (str). The adjectives of a label occur equally often, up to one row. Raises ValueError for an odd number of rows,
    fewer than 2, or more than the 1,440 there are.
    """
    most = 2 * len(_POSITIVE) * len(_TEMPLATES) * len(_NOUNS)
    if rows % 2 or not 2 <= rows <= most:
        raise ValueError(f"rows is {rows}. Give an even number from 2 to {most}: half are positive, none repeats.")
    generator = np.random.default_rng(seed)
    # pairs (template, noun) in one random order for both labels: each label sees the same frames, equally often
    frames = [(template, noun) for template in range(len(_TEMPLATES)) for noun in _NOUNS]
    order = generator.permutation(len(frames))
    sentences = []
    for label, adjectives in ((True, _POSITIVE), (False, _NEGATIVE)):
        for row in range(rows // 2):
            cycle, place = divmod(row, len(adjectives))
            # a Latin walk: adjective `place` takes a new frame in each cycle, and so no sentence repeats
            template, noun = frames[order[(cycle + place) % len(frames)]]
            adjective = adjectives[place]
            sentence = _TEMPLATES[template].format(noun=noun, adjective=adjective)
            sentences.append((_with_article(sentence), label, adjective, template, noun))
    table = pd.DataFrame(sentences, columns=["text", "label", "group", "template", "noun"])
    return table.iloc[generator.permutation(len(table))].reset_index(drop=True)


def _with_article(sentence: str) -> str:
    """The sentence with "an" for "a" before a vowel."""
    words = sentence.split(" ")
    for place, following in enumerate(words[1:]):
        if words[place].lower() == "a" and following[0] in "aeiou":
            words[place] += "n"
    return " ".join(words)
