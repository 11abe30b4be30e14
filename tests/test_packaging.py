"""The wheel holds the tree and nothing else, and models load from the repository root whatever `kernels` means there.

The folder `kernels/` has the name of a PyPI package that transformers looks for. From the repository root (`python -c`,
`python -m`) the folder comes first on the path: were it a package, transformers would take it for the PyPI one and fail
to load any model. It holds no `__init__.py` for that reason. The fast test plays PyPI's package with a stand-in of the
version transformers asks for; the slow one takes the real package.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers.utils.import_utils import KERNELS_MIN_VERSION

ROOT = Path(__file__).parent.parent
FOLDERS = ("capture", "data", "probes", "lenses", "interventions", "kernels", "figures", "app")
STAND_IN = '''
"""The names transformers takes from the package `kernels`, doing nothing."""

def use_kernel_forward_from_hub(layer_name):
    return lambda layer: layer

def use_kernelized_func(*functions):
    return lambda layer: layer

def register_kernel_mapping(*arguments, **options):
    pass

def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda self, *arguments, **options: None})
'''
LOAD = """
import importlib.util, json, sys
import microtome.capture
from microtome.capture.models import load_model
from transformers.utils.import_utils import is_kernels_available
import torch
loaded = load_model(sys.argv[1])
spec = importlib.util.find_spec("kernels")
print(json.dumps({
    "logits": loaded.module(torch.arange(3, 12)[None]).logits.sum().item(),
    "microtome": microtome.capture.__file__,
    "kernels": spec and spec.origin,
    "hub kernels": is_kernels_available(),
}))
"""


def run(*command: object, **options: object) -> str:
    """What a command prints; its error output is the message if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked_files() -> list[str]:
    return run("git", "ls-files", cwd=ROOT).splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the tracked files alone: no leftovers of earlier builds can slip in."""
    source = (
        tmp_path_factory.mktemp("source") / "clone"
    )  # not called microtome: from its parent it would shadow the wheel
    for name in tracked_files():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, source)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The Python of a new venv that holds the wheel and sees this environment's packages, but not its editable install.

    A path file makes it see them; path files in a folder named by a path file are not followed.
    """
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    purelib = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (purelib / "outer.pth").write_text("\n".join(sorted(outer)) + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel)
    return python


@pytest.fixture(scope="module")
def tiny_folder(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def stand_in(tmp_path) -> Path:
    """A folder for PYTHONPATH that holds a package and distribution `kernels` of the version transformers asks for."""
    (tmp_path / "kernels" / "layer").mkdir(parents=True)
    (tmp_path / "kernels" / "__init__.py").write_text(STAND_IN)
    (tmp_path / "kernels" / "layer" / "__init__.py").touch()
    (tmp_path / "kernels" / "layer" / "mode.py").write_text("class Mode:\n    pass\n")
    information = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    return tmp_path


def load_from_root(python: Path | str, folder: Path, *, extra: Path | None = None) -> dict:
    """Load a model in a child whose path begins with the repository root, and `extra` next."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if extra is not None:
        environment["PYTHONPATH"] = str(extra)
    printed = run(python, "-W", "error::UserWarning", "-c", LOAD, folder, cwd=ROOT, env=environment)
    return json.loads(printed.splitlines()[-1])


def test_the_wheel_is_the_tree(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        f"microtome/{name}" for name in tracked_files() if name.split("/")[0] in FOLDERS and (ROOT / name).exists()
    }
    assert packed == expected
    assert {f"microtome/{folder}/py.typed" for folder in FOLDERS} <= packed


def test_the_wheel_says_what_it_is(wheel):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
        entry_points = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
        assert any(name.endswith("LICENSE") for name in archive.namelist())
    core = [line.replace(" ", "") for line in fields.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(core) == sorted(settings["dependencies"])
    assert set(fields.get_all("Provides-Extra")) == {"app", "interop", "gpu", "dev"}
    assert fields["License-Expression"] == "Apache-2.0"
    assert "microtome = microtome.app.cli:main" in entry_points


def test_every_dependency_is_pinned():
    """Every requirement of every extra has one exact version in constraints.txt that it allows."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    assert len(pins) == len(lines)
    assert pins["torch"] == "2.13.0"
    for line in itertools.chain(settings["dependencies"], *settings["optional-dependencies"].values()):
        requirement = Requirement(line)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), line


def test_nothing_of_ours_can_be_imported_bare(installed):
    check = "import importlib.util, sys; print([n for n in sys.argv[1:] if importlib.util.find_spec(n)])"
    assert run(installed, "-P", "-c", check, *FOLDERS, "tests", "benchmarks", cwd="/").strip() == "[]"


def test_a_model_loads_from_the_root_without_pypi_s_kernels(installed, tiny_folder):
    report = load_from_root(installed, tiny_folder)
    assert Path(report["microtome"]).is_relative_to(installed.parent.parent)
    assert report["kernels"] is None  # the folder: a bare namespace
    assert not report["hub kernels"]


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_a_model_loads_from_the_root_with_pypi_s_kernels(installed, tiny_folder, stand_in, kind):
    report = load_from_root(installed if kind == "installed" else sys.executable, tiny_folder, extra=stand_in)
    home = installed.parent.parent if kind == "installed" else ROOT
    assert Path(report["microtome"]).is_relative_to(home)
    assert report["kernels"] == str(stand_in / "kernels" / "__init__.py")
    assert report["hub kernels"]


def test_the_command_runs_from_the_root(installed):
    assert "demo" in run(installed.parent / "microtome", "--help", cwd=ROOT)
    assert "demo" in run(installed, "-m", "microtome.app", "--help", cwd=ROOT)


@pytest.mark.slow
@pytest.mark.network
def test_a_model_loads_from_the_root_with_the_real_kernels_package(installed, tiny_folder, tmp_path):
    """PyPI's newest `kernels` may be older than transformers asks for; its metadata is then given that version."""
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, "kernels==0.17.2")
    (information,) = tmp_path.glob("kernels-*.dist-info")
    metadata = (information / "METADATA").read_text()
    (information / "METADATA").write_text(metadata.replace("Version: 0.17.2", f"Version: {KERNELS_MIN_VERSION}", 1))
    information.rename(tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info")
    report = load_from_root(installed, tiny_folder, extra=tmp_path)
    assert report["kernels"] == str(tmp_path / "kernels" / "__init__.py")
    assert report["hub kernels"]
    assert report["logits"] == pytest.approx(load_from_root(installed, tiny_folder)["logits"])
