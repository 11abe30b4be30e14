"""Bytes and seconds as a person reads them."""

import pytest

from microtome.data.spoken import spoken_bytes, spoken_seconds


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        *[(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (98_362_432, "98.4 MB"), (538_000_000, "538 MB")],
        *[
            (999_600_000, "1.0 GB"),
            (1_234_000_000, "1.2 GB"),
            (14_200_000_000, "14.2 GB"),
            (13_800_000_000_000, "13.8 TB"),
        ],
    ],
)
def test_bytes(nbytes, words) -> None:
    assert spoken_bytes(nbytes) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (12, "12 s"),
        (89.4, "89 s"),
        (90, "2 min"),
        (2700, "45 min"),
        (7800, "2 h 10 min"),
        (90000, "25 h 0 min"),
    ],
)
def test_seconds(seconds, words) -> None:
    assert spoken_seconds(seconds) == words
