"""The order in which a forward reaches sites, for methods that fit or add up one site after the other."""

from collections.abc import Sequence

from microtome.capture.sites import Site

_WITHIN_A_BLOCK = (
    *("resid_pre", "q", "k", "v", "q_rot", "k_rot", "z_attn", "z", "head_out", "attn_out", "mixer_out"),
    *("cross_out", "resid_mid", "router", "mlp_act", "mlp_out", "extra_out", "resid_post"),
)
_BEFORE_BLOCKS, _BEHIND_BLOCKS = ("embed",), ("final_norm", "logits")


def require_order(sites: Sequence[str]) -> tuple[str, ...]:
    """The sites as they are written everywhere.

    Raises ValueError for none, for one given twice, for a kind without its layer, and where a site comes before the one
    in front of it.
    """
    found = [Site.parse(site) for site in sites]
    if not found:
        raise ValueError("No sites: give at least one, such as 'resid_post.3'.")
    ranks = [_rank(site) for site in found]
    for one, other, rank, behind in zip(found, found[1:], ranks, ranks[1:], strict=False):
        if one == other or behind < rank:
            raise ValueError(
                f"{one} and then {other}: give each site once, in order of depth, as the model reaches them."
            )
    return tuple(map(str, found))


def _rank(site: Site) -> tuple[int, int]:
    if site.kind in _BEFORE_BLOCKS:
        return -1, 0
    if site.kind in _BEHIND_BLOCKS:
        return 1_000_000, _BEHIND_BLOCKS.index(site.kind)
    if site.layer is None:
        raise ValueError(f"{site} stands for every layer here: name single sites, such as {site}.3.")
    within = _WITHIN_A_BLOCK.index(site.kind) if site.kind in _WITHIN_A_BLOCK else 0
    return site.layer, within
