"""A document's shard depends on its number and the seed alone."""

import numpy as np
import pytest

from microtome.lenses.document_shards import SHARES, DocumentShards, shards_of_texts


def test_shares_hold_on_average_and_stay_when_documents_come():
    split = DocumentShards.of(SHARES, seed=3)
    numbers = split.numbers(range(5000))
    assert np.abs(np.bincount(numbers) / 5000 - [0.6, 0.2, 0.2]).max() < 0.02
    assert np.array_equal(split.numbers(range(0, 5000, 7)), numbers[::7])
    assert split.numbers([4999, 3, 4999]).tolist() == numbers[[4999, 3, 4999]].tolist()


def test_another_seed_is_another_split():
    one, other = (DocumentShards.of(SHARES, seed=seed).numbers(range(1000)) for seed in (0, 1))
    assert 0.3 < (one == other).mean() < 0.6


def test_folds_are_named_and_even():
    split = DocumentShards.of(4)
    assert split.names == ("fold0", "fold1", "fold2", "fold3")
    assert np.abs(np.bincount(split.numbers(range(4000))) - 1000).max() < 120


def test_a_list_is_kept_to():
    split = DocumentShards.of({7: "test", 2: "fit"})
    assert [split.names[k] for k in split.numbers([2, 7, 2])] == ["fit", "test", "fit"]
    with pytest.raises(KeyError, match="document 5 is in no shard"):
        split.numbers([5])


def test_shards_of_texts():
    assert shards_of_texts(["fit", "fit", "test"], [4, 4, 9]) == {4: "fit", 9: "test"}
    with pytest.raises(ValueError, match="document 4 has texts in 'fit' and 'test'"):
        shards_of_texts(["fit", "test"], [4, 4])
    with pytest.raises(ValueError, match="1 shards for 2 texts"):
        shards_of_texts(["fit"], [4, 4])


@pytest.mark.parametrize(
    ("shards", "said"),
    [({}, "is empty"), (1, "2 or more"), ({"fit": 0.5}, "sum to 0.5"), ({"fit": 1.5, "test": -0.5}, "above 0")],
)
def test_wrong_shards(shards, said):
    with pytest.raises(ValueError, match=said):
        DocumentShards.of(shards)
