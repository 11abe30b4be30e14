"""What a user can mend becomes one line on stderr and exit code 2; everything else keeps its traceback.

    with user_errors(as_json):
        ...

A user can mend: settings that pydantic refuses; a ValueError, KeyError, IndexError, TypeError or OSError that our own
code raised (the innermost frame is in `microtome`, so it is a check of ours and not a crash inside a library); an
OSError of the system about a place that is not part of the installation, or about a disk that is full or read-only; an
optional package that is not installed. KeyboardInterrupt says "Stopped." and exits with 130, as a shell expects.
With `as_json` the error also goes to stdout: {"error": {"kind": ..., "message": ...}}.
Beware: a broken pipe (`| head`) is left to typer, which ends quietly.
"""

import errno
import json
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from microtome.app.declared_packages import package_of, pip_command

_OURS = (ValueError, KeyError, IndexError, TypeError, OSError)
_FULL_OR_READ_ONLY = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_BRANCHES = ("bool", "int", "float", "str")
_SHOWN = 80  # characters of a refused value
_ADVICE = {
    errno.EACCES: "Give another place, or change who may use it",
    errno.EPERM: "Give another place, or change who may use it",
    errno.ENOSPC: "Free some space, or give another place (`microtome doctor` says how much is free)",
    errno.EDQUOT: "Free some space, or give another place (`microtome doctor` says how much is free)",
    errno.EROFS: "Give a place that can be written to",
    errno.EISDIR: "Give a file",
    errno.ENOTDIR: "Give a folder",
    errno.ENOENT: "Check the name",
}


class user_errors:
    """Context of a command.

    as_json: the command prints JSON, so an error is printed as JSON too. flags: names of settings that the command
    takes as options; errors in them are said with their flag.
    """

    def __init__(self, as_json: bool = False, flags: Collection[str] = ()) -> None:
        self.as_json = as_json
        self.flags = flags

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            own = " ".join(map(str, error.args)).removeprefix("Stopped.").strip()
            _exit(error, f"Stopped. {own}".strip(), 130, self.as_json)
        if isinstance(error, Exception) and (said := sentence(error, trace, self.flags)) is not None:
            _exit(error, said, 2, self.as_json)


def sentence(error: Exception, trace: TracebackType | None, flags: Collection[str] = ()) -> str | None:
    """An error in words for the user; None if it is not the user's to mend."""
    if isinstance(error, ValidationError):
        return "; ".join(_settings_sentence(e, error.title, flags) for e in error.errors())
    if isinstance(error, ModuleNotFoundError):
        return _missing_package(error.name or "")
    if isinstance(error, BrokenPipeError):
        return None
    if (said := _system_sentence(error)) is not None:
        return said
    if isinstance(error, _OURS) and _is_raised_by_us(trace):
        return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return None


def _is_raised_by_us(trace: TracebackType | None) -> bool:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("microtome.")


def _system_sentence(error: Exception) -> str | None:
    """An error of the operating system: named with its place. A file of the installation is no place of the user's."""
    code, places, what = _of_the_system(error)
    if code is None or any(_is_installed(Path(place)) for place in places):
        return None
    if not (places or code in _FULL_OR_READ_ONLY):
        return None
    advice = f". {_ADVICE[code]}." if code in _ADVICE else "."
    return f"{' -> '.join(places)}{': ' if places else ''}{what[0].lower()}{what[1:]}{advice}"


def _of_the_system(error: Exception) -> tuple[int | None, list[str], str]:
    """Error number, paths and words; no number for an error that is not the system's.

    Arrow gives a number and safetensors a text with the number; both write the path into their message.
    """
    if isinstance(error, OSError):
        named = [name for name in (error.filename, error.filename2) if isinstance(name, (str, bytes, Path))]
        if named:
            return error.errno, [os.fsdecode(name) for name in named], error.strerror or type(error).__name__
        code = error.errno
    else:
        number = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
        code = int(number[1]) if number else None
    return code, re.findall(r"""['"](/[^'"]+)['"]""", str(error)), os.strerror(code) if code else ""


def _is_installed(path: Path) -> bool:
    paths = sysconfig.get_paths()
    return path.is_absolute() and any(path.is_relative_to(paths[key]) for key in ("stdlib", "purelib", "platlib"))


def _missing_package(module: str) -> str | None:
    """The pip command for a package that Microtome declares; None for a module that is no package of these."""
    if (package := package_of(module)) is None or package.installed_version is not None:
        return None
    part = f" (of the optional part {package.extra!r})" if package.extra else ""
    return f"this needs the package {package.name}{part}, which is not installed. Run: {pip_command([package])}"


def _settings_sentence(error: ErrorDetails, title: str, flags: Collection[str]) -> str:
    """One of pydantic's errors in words of the command line: `--texts 3: ...`, or `data[1].texts 3: ...`."""
    place = error["loc"]
    said = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return _unknown_setting(place, title)
    if not place:
        return said
    name = f"--{str(place[0]).replace('_', '-')}" if len(place) == 1 and place[0] in flags else _path(place)
    if error["type"] == "missing":
        return f"{name} is not given; it has no default"
    given = repr(error.get("input"))
    return f"{name} {given if len(given) <= _SHOWN else given[:_SHOWN] + '…'}: {said[0].lower()}{said[1:]}"


def _path(place: Iterable[str | int]) -> str:
    """`data[1].texts` for ("data", 1, "texts"). The branches of a union, which pydantic names too, are left out."""
    named = [part for part in place if isinstance(part, int) or (part.isidentifier() and part not in _BRANCHES)]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in named).lstrip(".")


def _unknown_setting(place: tuple[str | int, ...], title: str) -> str:
    import difflib

    known = _settings_at(place[:-1], title)
    near = difflib.get_close_matches(str(place[-1]), known, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    return f"{_path(place) or place[-1]!r} is no setting" + (f"; there are {', '.join(known)}" if known else "") + hint


def _settings_at(place: tuple[str | int, ...], title: str) -> list[str]:
    """Names of the settings at a place of the model called `title`; none if that cannot be told."""
    models = [model for model in _models_below(BaseModel) if model.__name__ == title]
    for part in place:
        if isinstance(part, str):
            fields = [model.model_fields[part] for model in models if part in model.model_fields]
            models = [model for field in fields for model in _models_in(field.annotation)]
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def _models_below(model: type[BaseModel]) -> Iterable[type[BaseModel]]:
    for below in model.__subclasses__():
        if below.__module__.startswith("microtome."):
            yield below
        yield from _models_below(below)


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _exit(error: BaseException, message: str, code: int, as_json: bool) -> None:
    from rich.console import Console  # late: importing rich draws from Python's random generator

    if as_json:
        print(json.dumps({"error": {"kind": type(error).__name__, "message": message}}), flush=True)
    console = Console(stderr=True, highlight=False)
    console.print("microtome:", style="red", end=" ")
    console.print(" ".join(line.strip() for line in message.splitlines() if line.strip()), soft_wrap=True, markup=False)
    sys.exit(code)
