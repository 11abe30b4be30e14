"""Labelled sets built from registry packages, and the run folder."""

from microtome.data.registry import Archive as Archive
from microtome.data.registry import cache_folder as cache_folder
from microtome.data.registry import fetch as fetch
from microtome.data.runs import Run as Run
from microtome.data.runs import list_runs as list_runs
from microtome.data.sentiment import sentiment as sentiment
from microtome.data.sentiment import sentiment_ratings as sentiment_ratings
from microtome.data.table import read_table as read_table
from microtome.data.table import table_sha256 as table_sha256
from microtome.data.text_groups import text_groups as text_groups
from microtome.data.toy import toy_sentiment as toy_sentiment
