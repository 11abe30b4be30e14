import itertools
import re

import numpy as np
import pytest

from microtome.data.text_groups import normalised_text, text_groups

WORDS = [
    "the",
    "film",
    "was",
    "very",
    "good",
    "long",
    "bad",
    "slow",
    "one",
    "with",
    "many",
    "old",
    "new",
    "people",
    "in",
]


def random_texts(rows: int, seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=generator.integers(4, 9))) for _ in range(rows)]


def groups_by_all_pairs(texts, documents, similarity):
    """The definition, pair by pair: union-find over every edge."""
    parent = list(range(len(texts)))

    def root(row):
        while parent[row] != row:
            row = parent[row]
        return row

    words = [set(re.findall(r"\w+", text.casefold())) for text in texts]
    for i, j in itertools.combinations(range(len(texts)), 2):
        large = min(len(words[i]), len(words[j])) >= 4
        alike = large and len(words[i] & words[j]) >= similarity * len(words[i] | words[j]) - 1e-9
        if alike or normalised_text(texts[i]) == normalised_text(texts[j]) or documents[i] == documents[j]:
            parent[root(j)] = root(i)
    roots = [root(row) for row in range(len(texts))]
    return [list(dict.fromkeys(roots)).index(value) for value in roots]


@pytest.mark.parametrize("similarity", [0.5, 0.6, 0.75, 0.8, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_agrees_with_the_definition_pair_by_pair(similarity, seed):
    texts = random_texts(150, seed)
    documents = np.random.default_rng(seed).integers(0, 140, size=len(texts)).tolist()
    expected = groups_by_all_pairs(texts, documents, similarity)
    assert 1 < len(set(expected)) < len(texts)
    assert text_groups(texts, documents=documents, similarity=similarity).tolist() == expected


def test_order_of_rows_changes_the_numbers_only():
    texts = random_texts(80, seed=3)
    order = np.random.default_rng(0).permutation(len(texts))
    straight = text_groups(texts)[order]
    shuffled = text_groups([texts[row] for row in order])
    assert len(set(zip(straight.tolist(), shuffled.tolist(), strict=True))) == len(set(straight.tolist()))
    assert len(set(straight.tolist())) == len(set(shuffled.tolist()))


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("Yay. Another good phone call.", "YAY!! another good  phone call", True),
        ("I hate getting blood drawn here today", "I really hate getting blood drawn here today", True),
        ("wow", "Wow!", True),
        ("!", " ! ", True),
        ("!", "...", False),
        ("so good", "so bad", False),
        ("The plot is thin and the cast is lost.", "A quiet film that stays with you.", False),
        ("\uff26\uff29ne weather", "fine WEATHER", True),
        ("Straße gesperrt", "STRASSE gesperrt", True),
    ],
)
def test_twins(first, second, together):
    numbers = text_groups([first, second])
    assert (numbers[0] == numbers[1]) == together


def test_documents_and_chains_join():
    texts = ["alpha", "beta", "gamma", "Beta!", "delta"]
    assert text_groups(texts, documents=["x", "x", "y", "y", "z"]).tolist() == [0, 0, 0, 0, 1]
    assert text_groups(texts).tolist() == [0, 1, 2, 1, 3]


def test_similarity_none_joins_equal_texts_only():
    texts = [
        "I hate getting blood drawn here",
        "I really hate getting blood drawn here",
        "i HATE getting blood drawn here",
    ]
    assert text_groups(texts, similarity=None).tolist() == [0, 1, 0]
    assert text_groups(texts).tolist() == [0, 0, 0]


def test_no_texts():
    assert text_groups([]).tolist() == []


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="1 documents for 2 texts"):
        text_groups(["a", "b"], documents=["x"])
    with pytest.raises(ValueError, match=r"similarity is 1\.5"):
        text_groups(["a", "b"], similarity=1.5)
