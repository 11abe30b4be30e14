"""Small grids: two saved tiny models, two tables of sentences, and settings that take a second."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import yaml

from microtome.app.grid_config import GridConfig

NOUNS = ("cat", "dog", "bird", "film", "book", "day", "man", "woman", "child", "house", "river", "tree", "city")
WORDS_OF = {"good": ("good", "great", "happy"), "bad": ("bad", "awful", "sad")}
PROBE = {"folds": 2, "inner_folds": 2, "permutations": 20, "bootstraps": 100}


def sentences(rows: int, seed: int) -> pd.DataFrame:
    """Columns review, verdict (good or bad), stars (1 to 5), place (a, b or c), author."""
    chance = random.Random(seed)
    table = []
    for row in range(rows):
        verdict = ("good", "bad")[row % 2]
        start = " ".join(chance.choices(NOUNS, k=chance.randint(1, 4)))
        review = f"the {start} {chance.choice(NOUNS)} was {chance.choice(WORDS_OF[verdict])} {row % 7 * 'so '}."
        table.append((review, verdict, row % 5 + 1, "abc"[row % 3], f"author {row // 2}"))
    return pd.DataFrame(table, columns=["review", "verdict", "stars", "place", "author"])


@pytest.fixture(scope="session")
def model_folders(tiny, word_tokenizer, tmp_path_factory) -> list[str]:
    """A llama and a GPT-2, as save_pretrained writes them."""
    folders = []
    for kind in ("llama", "gpt2"):
        folder = tmp_path_factory.mktemp("models") / kind
        tiny(kind).save_pretrained(folder)
        word_tokenizer.save_pretrained(folder)
        folders.append(str(folder))
    return folders


@pytest.fixture(scope="session")
def tables(tmp_path_factory) -> list[str]:
    """Two CSV files of 40 sentences by 20 authors."""
    folder = tmp_path_factory.mktemp("tables")
    for name, seed in (("first", 1), ("second", 2)):
        sentences(40, seed).drop_duplicates("review").to_csv(folder / f"{name}.csv", index=False)
    return [str(folder / f"{name}.csv") for name in ("first", "second")]


@pytest.fixture(scope="session")
def reviews(tmp_path_factory) -> str:
    """A CSV file of 300 sentences by 150 authors."""
    file = tmp_path_factory.mktemp("reviews") / "mine.csv"
    sentences(300, 3).drop_duplicates("review").to_csv(file, index=False)
    return str(file)


@pytest.fixture(scope="session")
def write_grid(model_folders, tables) -> Callable[..., Path]:
    """`write_grid(folder, **changes)`: writes folder/grid.yaml, one model and one table by default; returns its path.

    The grid is called night and lies in folder/runs.
    """

    def write(folder: Path, **changes) -> Path:
        settings = {
            "name": "night",
            "out": str(folder / "runs"),
            "models": model_folders[:1],
            "data": [{"file": tables[0], "text": "review", "group": "author"}],
            "sites": [["resid_post", "z"]],
            "labels": ["verdict"],
            "probe": PROBE,
            "report": False,
        } | changes
        GridConfig(**settings)
        path = folder / "grid.yaml"
        path.write_text(yaml.safe_dump(settings), encoding="utf-8")
        return path

    return write


@pytest.fixture
def grid(write_grid, tmp_path) -> Callable[..., Path]:
    """`grid(**changes)`: `write_grid` in this test's folder."""
    return partial(write_grid, tmp_path)
