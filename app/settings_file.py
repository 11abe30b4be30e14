"""A command's settings from a YAML file and from flags: flags win, and what neither gives keeps its default."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

Settings = TypeVar("Settings", bound=BaseModel)


def read_settings(model: type[Settings], config: Path | None, given: Mapping[str, Any] | None = None) -> Settings:
    """Settings of a command.

    model: the command's settings model. config: a YAML file of names with values, or None. given: values by name that
    override the file's. Raises FileNotFoundError if there is no such file, ValueError if it holds no settings, and what
    the model raises.
    """
    held = _held_by(config) if config is not None else {}
    return model(**(held | dict(given or {})))


def holds_setting(config: Path, name: str) -> bool:
    """Whether a settings file says anything of that name. Raises as `read_settings`."""
    return name in _held_by(config)


def as_yaml(text: str) -> Any:
    """A flag's value as it would be read from a file: "3" is a number, "yes" stays a word."""
    value = yaml.safe_load(text)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text


def _held_by(config: Path) -> dict:
    if not config.is_file():
        raise FileNotFoundError(f"there is no settings file {config}; the working directory is {Path.cwd()}.")
    try:
        held = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(
            f"{config}{where} is no YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{config} is no UTF-8 text ({error.reason}). Settings are a YAML text file.") from error
    if not isinstance(held, dict):
        raise ValueError(f"{config} holds a {type(held).__name__}; settings are names with values, 'texts: 640'.")
    if strange := [key for key in held if not isinstance(key, str)]:
        raise ValueError(f"{config}: {strange[0]!r} is no name of a setting. Settings are names with values.")
    return held
