"""The tags of the Brown corpus as the twelve universal parts of speech.

    universal_tag("nn-tl-hl") == "NOUN"   universal_tag("ppss+ber") == "PRON"   universal_tag("md*") == "VERB"

Brown tags: Francis and Kucera (1979), "Manual of Information to accompany A Standard Corpus of Present-Day Edited
American English", section on the tag set. A tag is one or more base tags joined by + (contracted words: "they're" is
ppss+ber), each with * for a contracted "not", behind fw- for a foreign word, before -tl (in a title), -hl (in a
headline) and -nc (a word that is cited, not used). The universal ones: Petrov, Das and McDonald (2012), "A Universal
Part-of-Speech Tagset", LREC, section 2.

Decided here: a compound counts as its first part, so "don't" is a VERB and "they're" a PRON. Foreign words and words
that Brown leaves undetermined (nil) are X, as are interjections; possessive pronouns are PRON, "there is" is DET,
ordinals and "many", "next", "same" (ap) are ADJ, subordinating conjunctions are ADP, "not" is ADV, "to" before a verb
and verb particles are PRT: what that paper does with the corresponding tags of the Penn Treebank. "All", "half", "both"
and "such" before a determiner (abn, abx, abl) are DET.
"""

UNIVERSAL_TAGS = ("VERB", "NOUN", "PRON", "ADJ", "ADV", "ADP", "CONJ", "DET", "NUM", "PRT", "X", ".")

# a $ at the end (possessive) is not listed: it changes no part of speech but that of pp$ and pp$$
_BASE_TAGS = {
    "VERB": "vb vbd vbg vbn vbz md be bed bedz beg bem ben ber bez do dod doz hv hvd hvg hvn hvz",
    "NOUN": "nn nns np nps nr nrs",
    "PRON": "pn ppl ppls ppo pps ppss pp wp wpo wps",
    "ADJ": "jj jjr jjs jjt ap od",
    "ADV": "rb rbr rbt rn ql qlp wql wrb *",
    "ADP": "in cs",
    "CONJ": "cc",
    "DET": "at dt dti dts dtx abl abn abx wdt ex",
    "NUM": "cd",
    "PRT": "rp to",
    "X": "uh nil",
    ".": ". , : ( ) -- `` '' '",
}
_UNIVERSAL = {base: universal for universal, bases in _BASE_TAGS.items() for base in bases.split()}


def base_tag(tag: str) -> str:
    """The first part of a compound, lower case, without -tl, -hl, -nc, the * of "not" and the $ of a possessive."""
    first = tag.lower().split("+")[0]
    if first.startswith("--"):
        return "--"
    first = first.partition("-")[0] if not first.startswith("fw-") else first[:3] + first[3:].partition("-")[0]
    return first if first == "*" else first.rstrip("*").rstrip("$")


def universal_tag(tag: str) -> str | None:
    """One of UNIVERSAL_TAGS; None for a tag that is not of the Brown set, which gets no label."""
    base = base_tag(tag)
    return "X" if base.startswith("fw-") else _UNIVERSAL.get(base)
