"""Find and prove every family, print each as it comes, and write what `test_families.py` expects and the README shows.

python tests/families/survey.py [--write] [NAME ...]
"""

import argparse
import json
import time
import warnings
from collections import Counter
from pathlib import Path

import transformers
from tiny_families import FAMILIES, GROUPS, built, verdict

HERE = Path(__file__).parent


def main() -> None:
    """Run the families that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write expected.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found: dict[str, str] = {}
    for name in options.names or FAMILIES:
        started = time.perf_counter()
        model = built(name)
        if isinstance(model, str):
            print(f"{name}: does not build: {model}", flush=True)
            continue
        found[name], anatomy = verdict(model)
        print(f"{name}: {found[name]} ({time.perf_counter() - started:.1f} s)", flush=True)
        if found[name] == "part":
            failed = [f"{i.name} at {i.site} misses by {i.error:.2g}" for i in anatomy.proof if not i.holds]
            table = anatomy.coverage().query("offered < of and stack == ''")
            reasons = [f"{row.kind} {row.offered} of {row.of}: {row.reason[:200]}" for row in table.itertuples()]
            print("\n".join(f"    {line}" for line in [*failed[:3], *reasons]), flush=True)
    print("\n| group | built | in full | in part | refused |\n|---|---|---|---|---|")
    for group, names in GROUPS.items():
        counts = Counter(found[name] for name in names if name in found)
        print(f"| {group} | {counts.total()} | {counts['full']} | {counts['part']} | {counts['refused']} |")
    if options.write:
        (HERE / "expected.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
