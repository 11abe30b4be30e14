"""Sparse dictionaries of a site (sparse autoencoders): read, applied, trained and judged."""

from microtome.lenses.dictionaries.dictionary import Dictionary as Dictionary
from microtome.lenses.dictionaries.reading import load_dictionary as load_dictionary
from microtome.lenses.dictionaries.report import DictionaryReport as DictionaryReport
from microtome.lenses.dictionaries.report import dictionary_report as dictionary_report
from microtome.lenses.dictionaries.training import DictionarySettings as DictionarySettings
from microtome.lenses.dictionaries.training import train_dictionary as train_dictionary
