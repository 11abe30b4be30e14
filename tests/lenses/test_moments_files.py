"""A pass that is killed leaves one whole state, and what goes on from it is what would have gone on without it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("rows", ["", "routed"])
def test_a_killed_pass_goes_on_to_the_same_bits(tmp_path, rows):
    script = Path(__file__).with_name("killed_moments.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "8", *rows.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == 8
    assert found["resumed"] >= 3
    assert found["differing"] == []
