"""The docs check sees what it is there for."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.main import get_command

SCRIPT = Path(__file__).parents[1] / "docs" / "check.py"


@pytest.fixture(scope="module")
def check() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("docs_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cli() -> object:
    app = typer.Typer()

    @app.command()
    def fit(source: str, steps: int = 1) -> None: ...

    @app.command()
    def demo(quick: bool = False) -> None: ...

    return get_command(app)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "Makefile").write_text("demo:\n\t@true\ntest: demo\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "log.md").write_text("# What `failed`, and why\n")
    return tmp_path


GOOD = """
# Title
[log](docs/log.md), [why](docs/log.md#what-failed-and-why), [here](#title), [out](https://a.b/c)
`docs/log.md`, `make test`
make sure
```bash
make demo
kvlingo fit small --steps 3 \\
    --steps=4   # and more
$ kvlingo demo --no-quick
kvlingo --help
ls --whatever
```
```python
from kvlingo.errors import BadInput
```
"""


def test_good_documents_have_no_problem(check: ModuleType, repo: Path, cli: object) -> None:
    (repo / "README.md").write_text(GOOD)
    assert list(check.problems(repo, cli)) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[log](docs/logs.md)", "link to docs/logs.md: no such file"),
        ("[why](docs/log.md#how)", "link to docs/log.md#how: no such heading"),
        ("see `docs/plan.md`", "`docs/plan.md`: no such file"),
        ("run `make tests`", "make tests: no such target"),
        ("```\nmake me\n```", "make me: no such target"),
        ("```bash\nkvlingo fits x\n```", "no command fits"),
        ("```bash\nkvlingo fit x \\\n  --step 3\n```", "no flag --step"),
        ("```python\nx = (\n```", "python example"),
        ("```python\nfrom kvlingo.errors import Oops\n```", "kvlingo.errors has no Oops"),
        ("```python\nfrom kvlingo.nothing import x\n```", "No module named"),
    ],
)
def test_a_problem_is_named(check: ModuleType, repo: Path, cli: object, text: str, problem: str) -> None:
    (repo / "README.md").write_text(text)
    (found,) = check.problems(repo, cli)
    assert found.startswith("README.md: ")
    assert problem in found
