"""Who may import whom, read from the syntax trees, and what importing must leave alone."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "kernels": set(),
    "data": set(),
    "figures": set(),
    "capture": {"kernels", "data"},
    "probes": {"kernels", "data", "figures", "capture"},
    "lenses": {"kernels", "data", "figures", "capture"},
    "interventions": {"kernels", "data", "figures", "capture", "probes", "lenses"},
    "app": {"kernels", "data", "figures", "capture", "probes", "lenses", "interventions"},
}
ONLY_IN_APP = {"streamlit", "typer", "rich"}
# Packages of extras: inside the function that needs them, but for Streamlit's own pages and the Triton kernels.
OPTIONAL = {"streamlit": "app/", "triton": "_triton.py", "transformer_lens": None, "nnsight": None}
HOOKS = {
    *("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
    *("register_full_backward_pre_hook", "register_module_forward_hook", "register_module_forward_pre_hook"),
    *("AttentionInterface", "AttentionMaskInterface"),
}
FILES = sorted(file for folder in MAY_IMPORT for file in (ROOT / folder).rglob("*.py"))
ALL_FILES = sorted({*FILES, *(file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py"))})


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def imports(nodes: Iterator[ast.AST]) -> set[str]:
    """What these nodes import: `import a.b` as a.b, `from a.b import c` as a.b.c, relative ones with their dots."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return found


def imported_anywhere(file: Path) -> set[str]:
    return imports(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def imported_on_import(file: Path) -> set[str]:
    """What importing the file imports: everything outside its functions."""

    def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for child in ast.iter_child_nodes(node):
                yield from outside_functions(child)

    return imports(outside_functions(ast.parse(file.read_text(encoding="utf-8"))))


def optional_imports(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported_on_import(file)} & OPTIONAL.keys()


def breaches(file: Path) -> list[str]:
    """What a file of the package imports against the rules."""
    folder = file.relative_to(ROOT).parts[0]
    found = []
    for name in sorted(imported_anywhere(file)):
        top, _, rest = name.partition(".")
        if name.startswith("."):
            if file.name != "__init__.py" or name.startswith(".."):
                found.append(f"{name}: import absolutely")
        elif top == "microtome":
            other = rest.partition(".")[0]
            if other != folder and other not in MAY_IMPORT[folder]:
                found.append(f"{name}: {folder} may import {sorted(MAY_IMPORT[folder]) or 'nothing of ours'}")
        elif top in MAY_IMPORT or top == "tests":
            found.append(f"{name}: write microtome.{top}")
        elif top in ONLY_IN_APP and folder != "app":
            found.append(f"{name}: only app uses {top}")
    for package in optional_imports(file):
        place = OPTIONAL[package]
        if place is None or place not in name_of(file):
            found.append(f"{package}: import it inside the function that needs it")
    return found


def test_there_is_something_to_check():
    assert {file.relative_to(ROOT).parts[0] for file in FILES} == MAY_IMPORT.keys()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_follow_the_layers(file):
    assert breaches(file) == []


@pytest.mark.parametrize(
    ("folder", "line", "breach"),
    [
        ("kernels", "from microtome.data.runs import Run", "kernels may import nothing of ours"),
        ("probes", "import microtome.lenses.tuned_lens", "probes may import"),
        ("capture", "from .sites import Site", "import absolutely"),
        ("capture", "from kernels.attention_rows import rows", "write microtome.kernels"),
        ("figures", "def show():\n    import streamlit", "only app uses streamlit"),
        ("data", "from rich.table import Table", "only app uses rich"),
        ("capture", "if True:\n    import nnsight", "inside the function"),
        ("kernels", "import triton.language as tl", "inside the function"),
    ],
)
def test_breaches_are_seen(tmp_path, monkeypatch, folder, line, breach):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / folder).mkdir()
    file = tmp_path / folder / "some_noun.py"
    file.write_text(line)
    assert any(breach in found for found in breaches(file))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("kernels/rows_triton.py", "import triton"),
        ("app/probe_page.py", "import streamlit"),
        ("capture/nnsight_adapter.py", "def load():\n    import nnsight"),
        ("capture/__init__.py", "from .sites import Site as Site"),
        ("app/cli.py", "import typer\nfrom microtome.probes.sweep import sweep"),
    ],
)
def test_what_is_allowed_passes(tmp_path, monkeypatch, name, line):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(line)
    assert breaches(tmp_path / name) == []


def test_only_capture_registers_hooks():
    outside = [file for file in FILES if file.relative_to(ROOT).parts[0] != "capture"]
    found = [
        f"{name_of(file)}:{node.lineno}"
        for file in outside
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr in HOOKS) or (isinstance(node, ast.Name) and node.id in HOOKS)
    ]
    assert found == []


def test_annotations_are_never_strings():
    assert [name_of(file) for file in ALL_FILES if "__future__.annotations" in imported_anywhere(file)] == []


def test_init_files_are_where_they_belong_and_hold_no_logic():
    inits = {name_of(file) for file in ALL_FILES if file.name == "__init__.py"}
    packages = {*MAY_IMPORT, "lenses/transport", "lenses/dictionaries"} - {"kernels"}
    assert inits == {f"{folder}/__init__.py" for folder in packages}
    for name in inits:
        nodes = ast.parse((ROOT / name).read_text(encoding="utf-8")).body
        assert isinstance(nodes[0], ast.Expr), f"{name} has no docstring"
        assert all(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes[1:]), f"{name} holds logic"


IMPORT_EACH = """
import importlib, json, logging, os, random, sys, threading
import numpy, pandas, plotly, pydantic, rich, sklearn, torch, tqdm, transformers, typer  # theirs is not ours to judge
import transformers.modeling_utils

def state():
    levels = {f"level of logger {name}": logging.getLogger(name).level for name in before_names}
    return levels | {
        "root logger": [logging.getLogger().level, len(logging.getLogger().handlers)],
        "levels of our loggers": [n for n in logging.root.manager.loggerDict
                                  if n.startswith("microtome") and logging.getLogger(n).level],
        "python's generator": hash(random.getstate()),
        "numpy's generator": numpy.random.get_state()[1].tolist(),
        "torch's generator": torch.random.get_rng_state().tolist(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
        "defaults": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_float32_matmul_precision()],
        "environment": dict(os.environ),
        "optional packages": sorted({"streamlit", "triton", "transformer_lens", "nnsight"} & sys.modules.keys()),
    }

before_names = [n for n in logging.root.manager.loggerDict]
before = state()
changes = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    after = state()
    changes |= {f"{name}: {key}": [before[key], after[key]] for key in before if before[key] != after[key]}
    before = after
print(json.dumps(changes))
"""


def test_importing_changes_nothing():
    files = [file for file in FILES if not optional_imports(file) and file.name != "__main__.py"]
    modules = [".".join(("microtome", *file.relative_to(ROOT).with_suffix("").parts)) for file in files]
    modules = [module.removesuffix(".__init__") for module in modules]
    child = subprocess.run([sys.executable, "-c", IMPORT_EACH, json.dumps(modules)], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout.splitlines()[-1]) == {}
    assert child.stdout.count("\n") == 1, "importing prints"
