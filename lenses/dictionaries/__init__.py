"""Sparse dictionaries of a site (sparse autoencoders): read, applied, trained and judged."""

from microtome.lenses.dictionaries.dictionary import Dictionary
from microtome.lenses.dictionaries.reading import load_dictionary
from microtome.lenses.dictionaries.report import DictionaryReport, dictionary_report, untrained_dictionary
from microtome.lenses.dictionaries.site_rows import NO_SINKS
from microtome.lenses.dictionaries.training import DictionarySettings, train_dictionary

__all__ = [
    "NO_SINKS",
    "Dictionary",
    "DictionaryReport",
    "DictionarySettings",
    "dictionary_report",
    "load_dictionary",
    "train_dictionary",
    "untrained_dictionary",
]
