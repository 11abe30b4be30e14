"""The scorer of Hutto and Gilbert (2014), "VADER", as the package that holds the rated texts ships it.

`vader_scores(texts)` runs the package's own code (vaderSentiment 3.3.2, MIT), taken from its source archive, which is
fetched and checked by hash as `sentiment` does; nothing is installed. Beware: its lexicon and the ratings of
`sentiment` come from one project, so that a direction found in those texts is not judged independently by it.
"""

import importlib.util
import sys
import tarfile
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from filelock import FileLock

from microtome.data.registry import cache_folder, fetch
from microtome.data.replaced_file import replaced_file
from microtome.data.sentiment import SENTIMENT_ARCHIVE

_INSIDE = "vaderSentiment-3.3.2/vaderSentiment/"
_FILES = ("vaderSentiment.py", "vader_lexicon.txt", "emoji_utf8_lexicon.txt")


@cache
def _analyzer() -> Any:
    folder = cache_folder("vader")
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"), tarfile.open(fetch(SENTIMENT_ARCHIVE)) as archive:
        for name in _FILES:
            member = archive.extractfile(_INSIDE + name)
            if member is None:
                raise ValueError(f"{SENTIMENT_ARCHIVE.filename} lacks {_INSIDE}{name}.")
            with replaced_file(folder / name) as scratch:
                scratch.write_bytes(member.read())
    spec = importlib.util.spec_from_file_location("microtome_vader", folder / _FILES[0])
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder / _FILES[0]} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the module asks where its own source lies
    spec.loader.exec_module(module)
    return module.SentimentIntensityAnalyzer()


def vader_scores(texts: Sequence[str]) -> np.ndarray:
    """The compound score of each text, -1 (negative) to 1 (positive); 0 where no word is known.

    Raises FileNotFoundError if the package cannot be fetched.
    """
    analyzer = _analyzer()
    return np.array([analyzer.polarity_scores(text)["compound"] for text in texts])
