"""What a user can mend is one line and exit code 2 (or 130); a crash inside a library keeps its traceback."""

import errno
import json
import os
from importlib.metadata import requires

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from safetensors.torch import save_file

from microtome.app import declared_packages, user_errors
from microtome.app.user_errors import user_errors as errors_of_a_user

OURS = "microtome.app.some_module"  # classes and functions of a module called so are taken for ours


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    __module__ = OURS
    texts: int = Field(10, ge=5)


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid")
    __module__ = OURS
    data: list[Part] = []
    part: Part | None = None
    seeds: int = 0
    either: Part | int | None = None


def outcome(capsys, action, *, as_json: bool = False, flags=()) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of an action that a user can mend."""
    with pytest.raises(SystemExit) as stopped, errors_of_a_user(as_json, flags):
        action()
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("microtome: ")
    return stopped.value.code, said.out, said.err


def raising(error: BaseException, module: str = OURS):
    """A function of that module which raises the error."""
    space = {"__name__": module, "error": error}
    exec("def act():\n    raise error", space)
    return space["act"]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("ours to say"),
        KeyError("ours to say"),
        IndexError("ours to say"),
        TypeError("ours to say"),
        FileExistsError("ours to say"),
        BlockingIOError("ours to say"),
        PermissionError("ours to say"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_our_own_code_refuses(capsys, error):
    assert outcome(capsys, raising(error)) == (2, "", "microtome: ours to say\n")


@pytest.mark.parametrize("error", [RuntimeError("a crash"), ZeroDivisionError("a crash"), BrokenPipeError(32, "gone")])
def test_a_crash_of_ours_keeps_its_traceback(error):
    with pytest.raises(type(error)), errors_of_a_user():
        raising(error)()


def test_what_a_library_raises_keeps_its_traceback():
    with pytest.raises(ValueError, match="a crash"), errors_of_a_user():
        raising(ValueError("a crash"), "numpy.core")()
    with pytest.raises(TimeoutError), errors_of_a_user():
        raising(TimeoutError("no answer"), "urllib.request")()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.EACCES, "/mine/x: permission denied. Give another place"),
        (errno.ENOSPC, "/mine/x: no space left on device. Free some space"),
        (errno.EROFS, "/mine/x: read-only file system. Give a place that can be written to."),
        (errno.ENAMETOOLONG, "/mine/x: file name too long."),
    ],
)
def test_the_system_refuses_a_place(capsys, code, message):
    action = raising(OSError(code, os.strerror(code), "/mine/x"), "pathlib")
    assert message in outcome(capsys, action)[2]


def test_a_full_disk_needs_no_name(capsys):
    action = raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "shutil")
    assert outcome(capsys, action)[2].startswith("microtome: no space left on device. Free some space")


def test_real_errors_of_the_system_name_the_place(capsys, tmp_path):
    (tmp_path / "folder").mkdir()
    said = outcome(capsys, lambda: (tmp_path / "folder").read_text())[2]
    assert f"{tmp_path}/folder: is a directory. Give a file." in said
    said = outcome(capsys, lambda: np.load(tmp_path / "none.npy"))[2]
    assert f"{tmp_path}/none.npy: no such file or directory. Check the name." in said
    # Arrow and safetensors keep the path and the error's number in their message alone
    said = outcome(capsys, lambda: pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "folder"))[2]
    assert f"{tmp_path}/folder: is a directory" in said
    said = outcome(capsys, lambda: save_file({"a": torch.zeros(2)}, tmp_path / "no" / "x.safetensors"))[2]
    assert f"{tmp_path}/no/" in said
    assert "no such file or directory" in said


def test_a_file_of_the_installation_is_no_place_of_the_users():
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", pytest.__file__ + ".lost")
    with pytest.raises(FileNotFoundError), errors_of_a_user():
        raising(missing, "pathlib")()


def test_an_error_of_the_system_without_a_place_keeps_its_traceback():
    with pytest.raises(ConnectionResetError), errors_of_a_user():
        raising(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "socket")()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "Stopped."),
        (KeyboardInterrupt("3 of 5 shards are kept."), "Stopped. 3 of 5 shards are kept."),
        (KeyboardInterrupt("Stopped. The same command resumes."), "Stopped. The same command resumes."),
    ],
)
def test_ctrl_c_is_one_line_and_130(capsys, error, said):
    assert outcome(capsys, raising(error, "time")) == (130, "", f"microtome: {said}\n")


def test_a_missing_extra_tells_the_pip_command(capsys, monkeypatch):
    monkeypatch.setattr(declared_packages.DeclaredPackage, "installed_version", property(lambda self: None))
    for module, package in [("streamlit", "streamlit"), ("transformer_lens.hook_points", "transformer-lens")]:
        [requirement] = [line.split(";")[0] for line in requires("microtome") if line.startswith(package)]
        said = outcome(capsys, raising(ModuleNotFoundError("no module", name=module), "importlib"))[2]
        assert f"which is not installed. Run: pip install '{requirement}'" in said
        assert "of the optional part" in said
    said = outcome(capsys, raising(ModuleNotFoundError("no module", name="sklearn.svm"), "importlib"))[2]
    assert "pip install 'scikit-learn>=" in said
    assert "optional" not in said


@pytest.mark.parametrize("module", ["microtome.app.nowhere", "torch.nowhere"])
def test_a_module_missing_inside_a_package_is_a_crash(module):
    with pytest.raises(ModuleNotFoundError), errors_of_a_user():
        raising(ModuleNotFoundError("no module", name=module), "importlib")()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": [{}, {"texts": 3}]}, "data[1].texts 3: input should be greater than or equal to 5"),
        ({"part": {"texts": "many"}}, "part.texts 'many': input should be a valid integer"),
        ({"seeds": "x" * 500}, "…: input should be a valid integer"),
        ({"either": "x"}, "either 'x': input should be a valid integer"),
        ({"sedes": 1}, "'sedes' is no setting; there are data, part, seeds, either. Did you mean 'seeds'?"),
        ({"data": [{"text": 1}]}, "'data[0].text' is no setting; there are texts. Did you mean 'texts'?"),
    ],
)
def test_settings_are_named_by_their_place(capsys, given, message):
    assert message in outcome(capsys, lambda: Whole(**given))[2]


def test_a_setting_that_is_a_flag_is_named_by_its_flag(capsys):
    assert "--seeds 'x': input should" in outcome(capsys, lambda: Whole(seeds="x"), flags=Whole.model_fields)[2]
    said = outcome(capsys, lambda: Whole(data=[{"texts": 1}]), flags=Whole.model_fields)[2]
    assert "microtome: data[0].texts 1: " in said


def test_several_refused_settings_are_one_line(capsys):
    said = outcome(capsys, lambda: Whole(seeds="x", data=[{"texts": 1}]))[2]
    assert "seeds 'x'" in said
    assert "; " in said


def test_values_that_are_no_settings_model_are_told_too(capsys):
    assert "[1] 'b': input should" in outcome(capsys, lambda: TypeAdapter(list[int]).validate_python([1, "b"]))[2]


def test_with_json_the_error_is_json_too(capsys):
    code, out, err = outcome(capsys, raising(ValueError("first line\nsecond line")), as_json=True)
    assert code == 2
    assert json.loads(out) == {"error": {"kind": "ValueError", "message": "first line\nsecond line"}}
    assert err == "microtome: first line second line\n"
    code, out, _ = outcome(capsys, raising(KeyboardInterrupt()), as_json=True)
    assert (code, json.loads(out)["error"]["kind"]) == (130, "KeyboardInterrupt")


def test_words_are_not_read_as_markup(capsys):
    assert "[/x]" in outcome(capsys, raising(ValueError("labels [/x]")))[2]


def test_what_goes_well_passes():
    with errors_of_a_user():
        pass
    assert user_errors.sentence(StopIteration(), None) is None
