"""Check that what the documents say exists: links, files, make targets, commands, flags, code.

Reads every Markdown file of the repository. Prints one line per problem; exit code 1 if there is
any. Does not judge figures: tables are generated from committed JSON, not checked here.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlingo.errors import MissingExtra

REPO = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OUR_FILE = re.compile(r"`((?:kvlingo|tests|docs|bench|results|examples)/[\w./-]*\w)`")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
MAKE_IN_BLOCK = re.compile(r"^(?:\$ )?make ([a-z][\w-]*)", re.MULTILINE)
MAKE_IN_LINE = re.compile(r"`make ([a-z][\w-]*)")
SHELL = {"", "bash", "console", "sh", "shell", "text"}


def documents(repo: Path) -> Iterator[Path]:
    """Yield the Markdown files, those of hidden folders left out."""
    for path in sorted(repo.rglob("*.md")):
        if not any(part.startswith(".") for part in path.relative_to(repo).parts):
            yield path


def anchors(text: str) -> set[str]:
    """Return the anchors that headings make, as GitHub spells them."""
    titles = (re.sub(r"[`*]", "", title).strip().lower() for title in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def broken_links(path: Path, text: str) -> Iterator[str]:
    """Yield relative links whose file or heading is not there."""
    for link in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        goal = path.parent / name if name else path
        if not goal.exists():
            yield f"link to {link}: no such file"
        elif anchor and goal.suffix == ".md" and anchor not in anchors(goal.read_text("utf-8")):
            yield f"link to {link}: no such heading"


def missing_files(repo: Path, text: str) -> Iterator[str]:
    """Yield our own files that are named and not there."""
    for name in OUR_FILE.findall(text):
        if not (repo / name).exists():
            yield f"`{name}`: no such file"


def missing_targets(repo: Path, text: str) -> Iterator[str]:
    """Yield make targets that the Makefile lacks."""
    targets = set(re.findall(r"^([\w-]+):", (repo / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = [name for _, code in blocks(text) for name in MAKE_IN_BLOCK.findall(code)]
    for name in (*named, *MAKE_IN_LINE.findall(FENCE.sub("", text))):
        if name not in targets:
            yield f"make {name}: no such target"


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of the fenced blocks."""
    yield from ((match[1], match[2]) for match in FENCE.finditer(text))


def bad_python(text: str) -> Iterator[str]:
    """Yield Python examples that don't parse, and names that `kvlingo` doesn't have."""
    for language, code in blocks(text):
        if language != "python":
            continue
        try:
            tree = ast.parse(code)
        except SyntaxError as error:
            yield f"python example: {error}"
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "kvlingo":
                yield from missing_names(str(node.module), [alias.name for alias in node.names])


def missing_names(module: str, names: list[str]) -> Iterator[str]:
    """Yield what can't be imported."""
    try:
        found = importlib.import_module(module)
    except MissingExtra:
        return  # not everything can be installed everywhere: checked where it is
    except ImportError as error:
        yield f"python example: {error}"
        return
    for name in names:
        if not hasattr(found, name):
            yield f"python example: {module} has no {name}"


def bad_commands(text: str, cli: Any) -> Iterator[str]:
    """Yield commands and flags that the command line doesn't have. `cli` is its click group."""
    for language, code in blocks(text):
        if language in SHELL:
            for line in code.replace("\\\n", " ").splitlines():
                yield from bad_command(line.removeprefix("$ "), cli)


def bad_command(line: str, cli: Any) -> Iterator[str]:
    """Yield what is wrong with one line, if it calls `kvlingo` at all."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return
    if not words or Path(words[0]).name != "kvlingo":
        return
    command, rest = cli, words[1:]
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            yield f"{line.strip()}: no command {rest[0]}"
            return
        command, rest = command.commands[rest[0]], rest[1:]
    known = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)} | {"--help"}
    for word in rest:
        flag = word.split("=")[0]
        if re.match(r"--?[a-zA-Z]", flag) and flag not in known:
            yield f"{line.strip()}: no flag {flag}"


def command_line() -> Any:
    """Return the click group behind `kvlingo`."""
    from typer.main import get_command

    return get_command(importlib.import_module("kvlingo.cli").app)


def problems(repo: Path, cli: Any) -> Iterator[str]:
    """Yield every problem in every document."""
    for path in documents(repo):
        text = path.read_text("utf-8")
        found = (
            *broken_links(path, text),
            *missing_files(repo, text),
            *missing_targets(repo, text),
            *bad_python(text),
            *bad_commands(text, cli),
        )
        yield from (f"{path.relative_to(repo)}: {problem}" for problem in found)


def main() -> int:
    """Check this repository."""
    found = list(problems(REPO, command_line()))
    for problem in found:
        print(problem)
    print(f"docs: {len(list(documents(REPO)))} documents, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
