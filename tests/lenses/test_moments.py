"""Streamed moments are those of all rows at once, however they come; what is refused."""

import numpy as np
import pytest
import torch

from microtome.capture.sites import Site
from microtome.lenses import moments_estimate
from microtome.lenses.cross_products import exact_products
from microtome.lenses.document_shards import DocumentShards
from microtome.lenses.moment_cells import other_documents
from microtome.lenses.moments import Moments
from microtome.lenses.moments_files import load_moments, save_moments
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.strata import TokenRule

WIDTHS = {"resid_pre.0": 6, "resid_post.0": 6, "z.1.2": 4, "resid_post.1": 6}
LENGTH, TEXTS = 12, 40  # rows of a text, texts


class Corpus:
    """Rows of 40 texts of 12 tokens, two texts a document; related sites, channels of mean 500 and deviation 1."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        n = LENGTH * TEXTS

        def noise(width: int) -> torch.Tensor:
            return torch.randn(n, width, generator=generator, dtype=torch.float64)

        first = noise(6) + torch.tensor([500.0, 0, -500, 3, 0, 1], dtype=torch.float64)
        second = first + 0.5 * noise(6)
        self.values = {
            "resid_pre.0": first,
            "resid_post.0": second,
            "z.1.2": noise(4),
            "resid_post.1": second @ torch.randn(6, 6, generator=generator, dtype=torch.float64) + noise(6),
        }
        self.values = {name: rows.to(dtype) for name, rows in self.values.items()}
        self.text = torch.arange(TEXTS).repeat_interleave(LENGTH)
        self.position = torch.arange(LENGTH).repeat(TEXTS)
        self.documents = self.text // 2
        self.special = torch.zeros(n, dtype=torch.bool)

    def feed(self, moments: Moments, sizes: list[int] | None = None, rows: torch.Tensor | None = None) -> Moments:
        """All rows (or some), in pieces of these sizes again and again."""
        rows = torch.arange(len(self.text)) if rows is None else rows
        sizes, start, number = sizes or [len(rows)], 0, 0
        while start < len(rows):
            some = rows[start : start + sizes[number % len(sizes)]]
            moments.update(
                {name: value[some] for name, value in self.values.items()},
                documents=self.documents[some],
                position=self.position[some],
                is_special=self.special[some],
                text=self.text[some],
            )
            start, number = start + len(some), number + 1
        return moments


def by_hand(corpus: Corpus, x: str, y: str, keep: np.ndarray) -> dict[str, np.ndarray]:
    """numpy on the stacked rows."""
    a, b = (corpus.values[name].double().numpy()[keep] for name in (x, y))
    a, b = a - a.mean(0), b - b.mean(0)
    return {"xx": a.T @ a, "xy": a.T @ b, "yy": b.T @ b}


def shard_of(corpus: Corpus, moments: Moments) -> np.ndarray:
    return moments.split.numbers(corpus.documents.tolist())


def assert_same(found: PairMoments, expected: PairMoments, tolerance: float = 1e-10) -> None:
    assert found.count == expected.count
    torch.testing.assert_close(found.mean_x, expected.mean_x, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.mean_y, expected.mean_y, rtol=tolerance, atol=tolerance)
    x, y = expected.xx.diagonal().sqrt(), expected.yy.diagonal().sqrt()
    for name, scale in (("xx", torch.outer(x, x)), ("xy", torch.outer(x, y)), ("yy", torch.outer(y, y))):
        error = (getattr(found, name) - getattr(expected, name)).abs() / scale
        assert float(error.max()) <= tolerance, name


PAIRS = [
    ("resid_pre.0", "resid_post.1"),
    ("resid_post.1", "resid_pre.0"),
    ("z.1.2", "z.1.2"),
    ("resid_post.1", "z.1.2"),
]


@pytest.mark.parametrize(
    ("chunk", "sizes", "is_finished"),
    [(7, [1, 5], True), (64, [13, 1, 40], False), (64, [480], True), (1, [480], True), (2048, [13, 40], False)],
)
def test_moments_are_those_of_the_stacked_rows(chunk, sizes, is_finished):
    corpus = Corpus()
    moments = corpus.feed(Moments(WIDTHS, chunk=chunk), sizes)
    if is_finished:
        moments.finish()
    shards = shard_of(corpus, moments)
    for number, shard in enumerate(moments.shards):
        for stratum, mask in (
            ("rest", corpus.position > 0),
            ("sinks", corpus.position == 0),
            ("all", corpus.position >= 0),
        ):
            keep = (shards == number) & mask.numpy()
            assert moments.count(shard, stratum) == keep.sum()
            for x, y in PAIRS:
                found = moments.pair(x, y, shard, stratum)
                assert found.count == keep.sum()
                for name, matrix in by_hand(corpus, x, y, keep).items():
                    scale = np.abs(matrix).max()
                    np.testing.assert_allclose(getattr(found, name).numpy(), matrix, rtol=0, atol=1e-10 * scale)
                mean = corpus.values[x].numpy()[keep].mean(0)
                np.testing.assert_allclose(found.mean_x.numpy(), mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float32_products_keep_a_channel_of_mean_500(dtype):
    corpus = Corpus(dtype)
    moments = corpus.feed(Moments(WIDTHS, shards={"all": 1}, chunk=256), [50])
    moments.finish()
    keep = (corpus.position > 0).numpy()
    x, y = (corpus.values[name].double()[torch.from_numpy(keep)] for name in ("resid_pre.0", "resid_post.1"))
    assert_same(moments.pair("resid_pre.0", "resid_post.1", "all"), PairMoments.from_rows(x, y), 1e-5)


def test_input_is_left_alone():
    corpus, untouched = Corpus(), Corpus()
    corpus.feed(Moments(WIDTHS, chunk=7), [50]).finish()
    assert all(torch.equal(corpus.values[name], untouched.values[name]) for name in WIDTHS)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_moments_made_apart_merge_to_those_made_together(parts, is_shuffled):
    corpus = Corpus()
    whole = corpus.feed(Moments(WIDTHS, shuffled=is_shuffled, chunk=50))
    whole.finish()
    merged = Moments(WIDTHS, shuffled=is_shuffled, chunk=50)
    for part in range(parts):
        one = Moments(WIDTHS, shuffled=is_shuffled, chunk=50)
        corpus.feed(one, [11], (corpus.documents % parts == part).nonzero()[:, 0])
        if part % 2:
            one.finish()  # with and without rows that wait
        merged.merge(one)
    assert merged.documents == whole.documents
    assert merged.counts()[["rest", "first"]].equals(whole.counts()[["rest", "first"]])
    for shard in whole.shards:
        for stratum in ("rest", "sinks", "all"):
            for x, y in PAIRS:
                assert_same(merged.pair(x, y, shard, stratum), whole.pair(x, y, shard, stratum), 1e-10)


def test_a_fold_left_out_is_the_total_minus_the_fold():
    corpus = Corpus()
    moments = corpus.feed(Moments(WIDTHS, shards=4, chunk=30))
    total = moments.pair("resid_pre.0", "resid_post.1", None)
    for fold in moments.shards:
        left = moments.pair("resid_pre.0", "resid_post.1", moments.training(fold))
        assert_same(left, total - moments.pair("resid_pre.0", "resid_post.1", fold), 1e-9)
    with pytest.raises(KeyError, match="'fold9' is no shard"):
        moments.training("fold9")


def test_a_sink_every_few_tokens_changes_the_rows_with_sinks_only():
    plain, sunk = Corpus(torch.float32), Corpus(torch.float32)
    rows = sunk.position == 0
    for name in ("resid_post.0", "resid_post.1"):
        sunk.values[name][rows] += 3000.0
    moments = [each.feed(Moments(WIDTHS, shards={"all": 1}, chunk=64), [100]) for each in (plain, sunk)]

    def r2(pair: PairMoments) -> float:
        solved = torch.linalg.solve(pair.xx, pair.xy)
        return float(1 - (pair.yy - solved.T @ pair.xy).trace() / pair.yy.trace())

    without, with_sinks = (
        [r2(m.pair("resid_post.0", "resid_post.1", "all", stratum)) for m in moments] for stratum in ("rest", "all")
    )
    assert without[0] == without[1]
    assert with_sinks[1] > max(with_sinks[0], without[0]) + 1e-3


def test_massive_tokens_are_sinks_wherever_they_are():
    corpus = Corpus(torch.float32)
    corpus.values = {name: rows - rows.mean(0) for name, rows in corpus.values.items()}
    corpus.values["resid_post.0"][5 * LENGTH + 3, 2] = 9000.0
    moments = corpus.feed(Moments(WIDTHS, shards={"all": 1}), [100])
    assert moments.counts().loc[0, ["rest", "first", "massive"]].tolist() == [439, 40, 1]
    off = corpus.feed(Moments(WIDTHS, shards={"all": 1}, rule=TokenRule(massive=False)), [100])
    assert off.counts()["massive"].sum() == 0
    with pytest.raises(KeyError, match=r"resid_post.9 is looked at for massive tokens and missing"):
        corpus.feed(Moments(WIDTHS, rule=TokenRule(looked_at=("resid_post.9",))))


def test_many_sinks_become_products_too_and_keep_their_digits():
    corpus = Corpus(torch.float32)
    corpus.special = corpus.position < 11
    for name in WIDTHS:
        corpus.values[name][corpus.special] += 3000.0
    moments = corpus.feed(Moments(WIDTHS, shards={"all": 1}, chunk=16), [100])
    cell = moments.cells["all", "sinks"]
    assert cell.products is not None
    assert cell.most == 16
    x, y = (corpus.values[name][corpus.special] for name in ("resid_pre.0", "resid_post.1"))
    assert_same(moments.pair("resid_pre.0", "resid_post.1", "all", "sinks"), PairMoments.from_rows(x, y), 1e-5)


@pytest.mark.parametrize("chunk", [24, 2048])
def test_the_shuffled_pairing_meets_other_documents_at_the_same_position(chunk):
    corpus = Corpus()
    position = corpus.position.double()
    corpus.values["resid_pre.0"][:, 3] = position
    corpus.values["resid_post.1"][:, 3] = position
    corpus.values["resid_pre.0"][:, 4] = corpus.documents.double()
    moments = corpus.feed(Moments(WIDTHS, shards={"all": 1}, shuffled=True, chunk=chunk), [60])
    moments.finish()
    true = moments.pair("resid_pre.0", "resid_post.1", "all")
    shuffled = moments.pair("resid_pre.0", "resid_post.1", "all", shuffled=True)
    unmatched = int(moments.counts().loc[0, "unmatched"])
    assert shuffled.count == true.count + 0 - unmatched
    assert float(shuffled.xy[3, 3] / shuffled.xx[3, 3]) == pytest.approx(1, abs=1e-9)  # the position is kept
    correlation = shuffled.xy / torch.outer(shuffled.xx.diagonal().sqrt(), shuffled.yy.diagonal().sqrt())
    assert float(correlation[:3].abs().max()) < 0.25
    assert_same(moments.pair("resid_post.1", "resid_pre.0", "all", shuffled=True), shuffled.reversed())
    same = moments.pair("resid_pre.0", "resid_pre.0", "all", shuffled=True)
    assert float(same.xy[0, 0] / same.xx[0, 0]) < 0.3  # no row with itself
    late = corpus.feed(Moments(WIDTHS, shards={"all": 1}, shuffled=True, chunk=2048), [60])
    if chunk == 2048:
        assert_same(late.pair("resid_post.1", "resid_pre.0", "all", shuffled=True), shuffled.reversed())


@pytest.mark.parametrize("seed", range(5))
def test_partners_are_the_same_rows_at_the_same_position_in_another_document(seed):
    draw = np.random.default_rng(seed)
    documents, positions = draw.integers(0, 4, 200), draw.integers(0, 9, 200)
    kept, partner = (each.numpy() for each in other_documents(documents.tolist(), positions.tolist()))
    assert (documents[kept] != documents[partner]).all()
    assert (positions[kept] == positions[partner]).all()
    assert sorted(kept) == sorted(partner)
    assert len(set(kept)) == len(kept)
    most = 0
    for place in range(9):
        counts = np.bincount(documents[positions == place], minlength=4)
        most += min(counts.sum(), 2 * (counts.sum() - counts.max()))
    assert len(kept) == most  # as many as can be


def test_one_document_alone_has_no_partner():
    assert [len(each) for each in other_documents([3, 3, 3], [0, 0, 1])] == [0, 0]
    corpus = Corpus()
    corpus.documents = torch.zeros_like(corpus.documents)
    moments = corpus.feed(Moments(WIDTHS, shards={"all": 1}, shuffled=True))
    assert moments.counts().loc[0, "unmatched"] == LENGTH * TEXTS
    with pytest.raises(ValueError, match="no two documents share a position"):
        moments.pair("resid_pre.0", "resid_post.1", "all", shuffled=True)


def test_tensors_of_two_models_and_of_other_widths_in_one():
    corpus = Corpus()
    keys = {("small", Site("resid_post", 0)): 6, ("large", Site("z", 1)): 8}
    moments = Moments(keys, shards={"all": 1}, rule=TokenRule(first=False))
    heads = torch.randn(480, 2, 4, dtype=torch.float64)
    values = {("small", Site("resid_post", 0)): corpus.values["resid_post.0"], "large/z.1": heads}
    moments.update(values, documents=corpus.documents, position=corpus.position)
    found = moments.pair(("small", Site("resid_post", 0)), "large/z.1", "all")
    assert_same(found, PairMoments.from_rows(corpus.values["resid_post.0"], heads.flatten(1)))


def test_precision_is_high_inside_and_restored_afterwards():
    torch.set_float32_matmul_precision("medium")
    try:
        with exact_products(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(RuntimeError), exact_products(torch.device("cpu")):
            torch.zeros(2) @ torch.zeros(3)
        assert torch.get_float32_matmul_precision() == "medium"
        corpus = Corpus(torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            moments = corpus.feed(Moments(WIDTHS, shards={"all": 1}, chunk=100), [50])
            moments.finish()
        x, y = (corpus.values[name][corpus.position > 0] for name in ("resid_pre.0", "resid_post.1"))
        assert_same(moments.pair("resid_pre.0", "resid_post.1", "all"), PairMoments.from_rows(x, y), 1e-5)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_estimate_is_what_is_taken_and_says_what_would_fit(monkeypatch):
    corpus = Corpus()
    moments = Moments(WIDTHS, chunk=16)
    estimate = moments.estimate(sinks=40)
    corpus.feed(moments).finish()
    taken = sum(b.numel() * 8 for s in moments.shards for b in moments.cells[s, "rest"].products.blocks)
    assert estimate.products == taken
    assert estimate.flops_per_token == 2 * taken // 8 // 3
    assert "10 pairs of sites in 3 shards" in str(estimate)
    needs = [Moments(WIDTHS, band, chunk=16).estimate().nbytes for band in (0, 1, 2, 3)]
    monkeypatch.setattr(moments_estimate, "free_memory", lambda: int(needs[1] / 0.9) + 1)
    with pytest.raises(
        ValueError, match=r"10 pairs of sites in 3 shards take .* free. pairs=1 \(sites at most 1 apart"
    ):
        Moments(WIDTHS, chunk=16).estimate().require_memory()
    Moments(WIDTHS, 1, chunk=16).estimate().require_memory()
    monkeypatch.setattr(moments_estimate, "free_memory", lambda: 1000)
    with pytest.raises(ValueError, match="not even pairs=0"):
        Moments(WIDTHS, chunk=16).estimate().require_memory()
    monkeypatch.setattr(moments_estimate, "free_memory", lambda: None)
    Moments(WIDTHS, chunk=16).estimate().require_memory()


def test_errors_of_settings_and_rows():
    corpus = Corpus()
    for chunk in (0, 5000):
        with pytest.raises(ValueError, match="expected 1 to 4096"):
            Moments(WIDTHS, chunk=chunk)
    short = {name: value[:2] for name, value in corpus.values.items()}
    where = {"documents": [0, 0], "position": torch.tensor([4, 5]), "text": torch.tensor([7, 7])}
    with pytest.raises(KeyError, match=r"z.1.2 is missing"):
        Moments(WIDTHS).update({k: v for k, v in short.items() if k != "z.1.2"}, **where)
    with pytest.raises(ValueError, match=r"resid_post.0 has shape \[2, 4\]; expected \[2, 6\]"):
        Moments(WIDTHS).update(short | {"resid_post.0": short["z.1.2"]}, **where)
    with pytest.raises(ValueError, match="1 documents for 2 tokens"):
        Moments(WIDTHS).update(short, **where | {"documents": [0]})
    for wrong in (float("nan"), float("inf"), -float("inf"), 1e16):
        bad = corpus.values["resid_post.1"][:2].clone()
        bad[1, 3] = wrong
        with pytest.raises(ValueError, match=r"resid_post.1 is NaN, infinite .* text 7, position 5"):
            Moments(WIDTHS).update(short | {"resid_post.1": bad}, **where)
    with pytest.raises(KeyError, match="document 0 is in no shard"):
        Moments(WIDTHS, shards={5: "fit"}).update(short, **where)
    nothing = {name: value[:0] for name, value in corpus.values.items()}
    empty = Moments(WIDTHS)
    empty.update(nothing, documents=[], position=torch.zeros(0, dtype=torch.int64))
    assert empty.count() == 0
    empty.finish()


def test_errors_of_asking():
    moments = Corpus().feed(Moments(WIDTHS, 1))
    with pytest.raises(KeyError, match=r"was not accumulated.*'band 1'.*pairs=3"):
        moments.pair("resid_pre.0", "resid_post.1")
    with pytest.raises(KeyError, match="not among these 4 sites"):
        moments.pair("resid_pre.0", "resid_post.5")
    with pytest.raises(KeyError, match="'train' is no shard"):
        moments.pair("resid_pre.0", "resid_post.0", "train")
    with pytest.raises(KeyError, match="'most' is no stratum"):
        moments._chosen("fit", "most")
    with pytest.raises(ValueError, match="shuffled=True"):
        moments.pair("resid_pre.0", "resid_post.0", shuffled=True)
    none = Corpus().feed(Moments(WIDTHS, rule=TokenRule(first=False)))
    with pytest.raises(ValueError, match="stratum 'sinks': no token is there"):
        none.pair("resid_pre.0", "resid_post.0", "fit", "sinks")


def test_errors_of_merging():
    corpus = Corpus()
    one = corpus.feed(Moments(WIDTHS))
    with pytest.raises(ValueError, match="20 documents are in both, such as 0"):
        one.merge(corpus.feed(Moments(WIDTHS)))
    for other, said in (
        (Moments(WIDTHS, 1), "pairs: "),
        (Moments(WIDTHS, seed=1), "split: "),
        (Moments(WIDTHS, rule=TokenRule(above=5.0)), "rule: "),
        (Moments(WIDTHS, provenance={"model": {"weights": "b"}}), "model: None here, .* there"),
        (Corpus(torch.float32).feed(Moments(WIDTHS)), "dtype: torch.float64 here, torch.float32 there"),
    ):
        with pytest.raises(ValueError, match=said):
            one.merge(other)


def test_a_split_made_once_can_be_given():
    split = DocumentShards.of({"a": 0.5, "b": 0.5}, seed=4)
    assert Moments(WIDTHS, shards=split).shards == ("a", "b")


def sinks_at(size: float, ordinary: float, documents: range, medians: dict | None = None) -> Moments:
    """One site; ordinary entries of +-`ordinary`, and in each document one token with an entry of `size`."""
    n = 10 * len(documents)
    rows = ordinary * torch.randn(n, 64, generator=torch.Generator().manual_seed(len(documents))).sign()
    rows[3::10, 5] = size
    moments = Moments({"resid_post.0": 64}, shards={"all": 1}, medians=medians)
    owners = torch.tensor(documents).repeat_interleave(10)
    moments.update({"resid_post.0": rows}, documents=owners, position=torch.arange(n) % 10)
    return moments


def test_medians_of_two_processes_that_part_tokens_otherwise_are_told(tmp_path):
    one, two = sinks_at(1500.0, 1.0, range(4)), sinks_at(1500.0, 2.0, range(4, 8))
    assert (one.count("all", "sinks"), two.count("all", "sinks")) == (8, 4)  # 4 first tokens each; 1500 > 1000, < 2000
    assert one.margins == (pytest.approx(0.001), pytest.approx(1.5))
    assert two.margins[0] == pytest.approx(0.75)
    save_moments(two, tmp_path)
    assert load_moments(tmp_path).margins == two.margins
    with pytest.warns(UserWarning, match=r"are 0.5 to 0.5 times those there.*between .up to 0.75 in the rest times"):
        one.merge(two)
    assert one.margins == (pytest.approx(0.75), pytest.approx(1.5))
    one = sinks_at(1500.0, 1.0, range(4))
    with pytest.warns(UserWarning, match=r"2 to 2 times .*between .from 1.5 among sinks times"):
        two.merge(one)
    alike = sinks_at(1500.0, 2.0, range(4, 8), one.medians)
    one.merge(alike)
    assert one.count("all", "sinks") == 16
    far = sinks_at(9000.0, 2.0, range(8, 12))
    one.merge(far)  # other medians, the same tokens: nothing to tell


def test_nan_at_a_site_that_is_only_looked_at():
    moments = Moments({"attn_out.0": 2}, rule=TokenRule(looked_at=("resid_post.0",)))
    rows = torch.ones(4, 2)
    stream = rows.clone()
    stream[2, 1] = float("nan")
    with pytest.raises(ValueError, match=r"resid_post.0 is NaN, infinite or past .* position 2"):
        moments.update({"attn_out.0": rows, "resid_post.0": stream}, documents=[0, 0, 0, 0], position=torch.arange(4))
