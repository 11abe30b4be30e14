"""Refusals that the binary and the multinomial solver share: features, folds and weights no fit can come from."""

LARGEST = 1e100  # squares of features must not overflow


def check_problem(features, labels, train, strengths, sample_weight) -> None:
    """Raise ValueError for input no fit can come from, whatever the labels stand for."""
    n_rows = features.shape[1]
    for name, given in (("labels", labels), ("train", train), ("sample_weight", sample_weight)):
        if given is not None and given.shape[-1] != n_rows:
            raise ValueError(f"{name} covers {given.shape[-1]} rows, features have {n_rows}; give one entry per row.")
    if len(strengths) == 0 or not bool(((strengths > 0) & strengths.isfinite()).all()):
        raise ValueError(
            f"strengths are C, finite and above 0; got {strengths.tolist()}. For nearly no penalty use "
            "a large C such as 1e4."
        )
    for site, rows in enumerate(features):
        if not bool(rows.abs().amax() < LARGEST):  # nor is NaN
            row, feature = (~(rows.abs() < LARGEST)).nonzero()[0].tolist()
            raise ValueError(
                f"features hold NaN, inf or numbers past {LARGEST:g}, first at site {site}, row {row}, "
                f"feature {feature}; drop the row or fix the capture."
            )
    if sample_weight is not None:
        if len(sample_weight) not in (1, len(labels)):
            raise ValueError(
                f"sample_weight has {len(sample_weight)} rows for {len(labels)} label sets; give one for all, "
                "or one for each."
            )
        if not bool(((sample_weight >= 0) & sample_weight.isfinite()).all()):
            raise ValueError("sample_weight must be finite and not negative; leave rows out with train instead.")
    counts = train.sum(1)
    if int(counts.min()) < 2:
        fold = int(counts.argmin())
        raise ValueError(f"fold {fold} trains on {int(counts[fold])} rows; a fit needs at least 2.")
