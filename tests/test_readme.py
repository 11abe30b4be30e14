"""The README cannot drift: its commands exist, all commands are in it, and its marked Python sessions run.

A fenced `python` block after the comment `<!-- test -->` is executed on the real model, in the order of the file and in
one namespace: as a doctest where it holds `>>>` prompts (`...` stands for any output), else as plain code.
"""

import ast
import doctest
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from microtome.app.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?P<mark><!-- test -->\s*\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
COMMANDS = typer.main.get_command(app).commands
NOT_FOR_README = {"help", "venv", "clean", "pictures"}


def blocks(text: str) -> Iterator[tuple[str, str, bool]]:
    """Language, code and whether it is marked for testing, of every fenced block."""
    for found in BLOCK.finditer(text):
        yield found["language"], found["code"], found["mark"] is not None


def command_lines(text: str) -> list[str]:
    """Every line of a fenced block that is not Python, without its prompt, and every inline code span."""
    fenced = [line for language, code, _ in blocks(text) if language != "python" for line in code.splitlines()]
    inline = INLINE.findall(BLOCK.sub("", text))
    return [line.strip().removeprefix("$ ") for line in [*fenced, *inline]]


def wrong_commands(text: str) -> list[str]:
    """Commands that do not exist: make targets, `microtome` commands, and their options, `ARGS` of make included."""
    found = []
    for line in command_lines(text):
        if not line.startswith(("make ", "microtome ")):
            continue
        program, *words = shlex.split(line, comments=True)
        if program == "make":
            given = [word.partition("=")[2] for word in words if word.startswith("ARGS=")]
            targets = [word for word in words if "=" not in word]
            found += [f"{line}: no such target {word}" for word in targets if word not in TARGETS]
            words = ["demo", *shlex.split(given[0])] if given and targets == ["demo"] else []
        if words and not words[0].startswith("-"):
            found += [f"{line}: {problem}" for problem in wrong_words(*words)]
    return found


def wrong_words(command: str, *words: str) -> list[str]:
    """What is wrong with a `microtome` command and its options."""
    if command not in COMMANDS:
        return [f"no such command {command}"]
    known = {option for parameter in COMMANDS[command].params for option in parameter.opts} | {"--help"}
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    return [f"no such option {option}" for option in sorted(given - known)]


def test_every_command_in_the_readme_exists():
    assert wrong_commands(README) == []


def test_every_command_is_in_the_readme():
    mentioned = {" ".join(line.split()[:2]) for line in command_lines(README)}
    assert {f"make {target}" for target in TARGETS - NOT_FOR_README} <= mentioned
    assert {f"microtome {name}" for name in COMMANDS} <= mentioned


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Use `make demo`, `make check` and make sure of it.", []),
        ("Run `make everything`.", ["no such target everything"]),
        ("```bash\n$ make test   # fast\nmake tset\n```", ["no such target tset"]),
        ("```console\n$ microtome demo --texts 600\n```", []),
        ("`microtome demo --textz 600`, `microtome dmo`", ["no such option --textz", "no such command dmo"]),
        ("```python\nmake everything\n```", []),
        ("""`make demo ARGS="--texts 600 --name 'two words'"`""", []),
        ('`make demo ARGS="--textz 600"`', ["no such option --textz"]),
    ],
)
def test_wrong_commands_are_seen(text, wrong):
    assert [line.split(": ", 1)[1] for line in wrong_commands(text)] == wrong


def test_marked_blocks_are_told_from_others():
    text = "<!-- test -->\n```python\na = 1\n```\nand\n\n```python\nb\n```\n<!-- test -->\n\n```python\nc\n```\n"
    assert list(blocks(text)) == [("python", "a = 1\n", True), ("python", "b\n", False), ("python", "c\n", True)]


def test_every_python_block_can_be_parsed():
    for language, code, _ in blocks(README):
        if language == "python":
            plain = "".join(example.source for example in doctest.DocTestParser().get_examples(code)) or code
            ast.parse(plain)


@pytest.mark.slow
@pytest.mark.network  # one of them fetches the sentiment set
def test_the_marked_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what they save stays out of the repository
    marked = [code for language, code, is_marked in blocks(README) if is_marked and language == "python"]
    assert marked, "no Python block of the README is marked with <!-- test -->"
    namespace: dict[str, object] = {}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for number, code in enumerate(marked):
        if ">>>" not in code:
            exec(compile(code, f"README block {number}", "exec"), namespace)
            continue
        test = doctest.DocTestParser().get_doctest(code, namespace, f"README block {number}", "README.md", None)
        report: list[str] = []
        runner.run(test, out=report.append, clear_globs=False)
        namespace.update(test.globs)
        assert runner.failures == 0, "".join(report)
