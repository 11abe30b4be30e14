"""Every notebook runs from top to bottom, and is committed without outputs."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path):
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            found = f"cell {number} of {path.name}"
            assert cell["outputs"] == [], f"{found} holds outputs: clear them before committing"
            assert cell["execution_count"] is None, f"{found} is numbered: clear outputs before committing"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    # Cells take minutes at most; files they write with relative paths go into a folder of this test.
    client = NotebookClient(notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    assert all(
        cell.get("execution_count") for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()
    )
