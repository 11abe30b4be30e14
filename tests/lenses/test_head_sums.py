import numpy as np
import pytest

from microtome.lenses.head_sums import HeadSums


def made(texts=40, seed=0):
    rng = np.random.default_rng(seed)
    sums, weights = rng.random((texts, 2, 3, 4)), rng.integers(1, 9, (texts, 2, 3, 4)).astype(float)
    return HeadSums(("a", "b"), sums * weights, weights)


def test_a_score_is_a_ratio_of_sums():
    held = made()
    expected = held.sums.sum(0) / held.weights.sum(0)
    np.testing.assert_allclose(held.means()["b"], expected[1])
    held.weights[:, 0] = 0
    assert np.isnan(held.means()["a"]).all()


def test_intervals_are_those_of_a_loop_over_drawn_documents():
    held = made()
    documents = [i // 2 for i in range(40)]
    found = held.intervals(documents, draws=300, seed=5)
    counts = np.random.default_rng(5).multinomial(20, np.full(20, 1 / 20), size=300)
    drawn = []
    for row in counts:
        texts = [
            text
            for document, times in enumerate(row)
            for _ in range(times)
            for text in (2 * document, 2 * document + 1)
        ]
        drawn.append(held.sums[texts].sum(0) / held.weights[texts].sum(0))
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    for number, name in enumerate(held.names):
        np.testing.assert_allclose(found[name][0], low[number])
        np.testing.assert_allclose(found[name][1], high[number])


def test_documents_that_vary_give_a_wider_interval_than_their_texts():
    sums = np.repeat(np.random.default_rng(0).random(5), 20)[:, None, None, None]
    held = HeadSums(("a",), sums, np.ones_like(sums))
    whole = held.intervals([i // 20 for i in range(100)], draws=500, seed=0)["a"]
    single = held.intervals(range(100), draws=500, seed=0)["a"]
    assert (whole[1] - whole[0]).item() > 2 * (single[1] - single[0]).item()


def test_draws_without_a_query_are_left_out_and_one_document_has_no_interval():
    held = made(texts=3)
    held.weights[1:, 0] = held.sums[1:, 0] = 0
    held.weights[:, 1] = 0
    found = held.intervals(range(3), draws=100, seed=0)
    np.testing.assert_allclose(found["a"][0], held.means()["a"])
    np.testing.assert_allclose(found["a"][1], held.means()["a"])
    assert np.isnan(found["b"]).all()
    assert np.isnan(held.intervals([4, 4, 4], draws=100, seed=0)["a"]).all()


@pytest.mark.parametrize("split", [1, 17])
def test_parts_of_the_texts_add_up(split):
    held = made()
    parts = [HeadSums(held.names, held.sums[rows], held.weights[rows]) for rows in (slice(split), slice(split, None))]
    sums, weights = (sum(getattr(part, name).sum(0) for part in parts) for name in ("sums", "weights"))
    np.testing.assert_allclose(sums[0] / weights[0], held.means()["a"])
