"""The shape of the package: who imports whom, what an import costs, what the sources never hold."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
PACKAGE = REPO / "kvlingo"

# A module imports only from those above it. The one place where the order is written down.
ORDER = re.findall(
    r"\w+",
    """
    errors steps files processes gguf_header geometry attention rope kv cache cache_writing open_cache packing
    correspondence spelling chat reading alignment probing
    selfcheck fingerprints language_model models outline batches anchors recompute pairing plan cost forecast traffic
    texts stats ridge features maps folding translator corpus metrics predictions trust confidence signs states
    assembling execution handoff generation
    mlx_library mlx_rotation mlx_models mlx_caches mlx_maps mlx timing calibration arms
    shapes public_shapes rehearsal collecting judging sensitivity fitting whitening compression objective distillation environment
    report evaluation quantised frontier reliability drift questions contexts prompts
    manifest readme store extracts workplace assets plots progress facts jobs compacting trials benchmark
    harness_arms harness_model harness recipes mlx_bench mapper_files interchange sheets demo commands cli
    """,
)

# The same for the commands, `kvlingo/commands/`.
COMMAND_ORDER = re.findall(r"\w+", "console options learning recipes using exchanging serving timing routers")

# The same for the gateway, `kvlingo/serve/`, which may import all of the package but the command line.
SERVE_ORDER = re.findall(
    r"\w+",
    """
    protocol settings keys sessions freezing disk shelf forms sampling duet decoding healing switching ahead relay engine routing
    upstream ledger passing remote loading calibrating schema calls replies answering metrics tracing doors speaking gateway
    external vllm
    """,
)

# The same for the routers, `kvlingo/serve/routing/`.
ROUTING_ORDER = re.findall(
    r"\w+", "choosing threshold cascade token features learned rules routed building rows learning comparing"
)

# The same for what other engines share, `kvlingo/serve/external/`.
EXTERNAL_ORDER = re.findall(
    r"\w+",
    """
    refusals versions threads options entries stores redis_store mooncake_store opening
    matching carrying scheduling working telling headers twins servers checking
    """,
)

# vLLM is an engine among others: only its connector knows it, and nothing of ours imports that.
MAY_IMPORT_VLLM = {"vllm"}

# The web framework ends here: everything else sees an `Engine`, a body or plain ASGI.
MAY_IMPORT_FASTAPI = {"gateway"}

# scikit-learn fits a router here; serving one needs no part of it.
MAY_IMPORT_SKLEARN = {"learning"}

# lm-eval's model type is made of its classes: registered by name, so that nothing imports it.
MAY_IMPORT_LM_EVAL = {"harness_model", "harness"}

# These are extras too.
EXTRAS = {
    "llguidance": "forms",
    "opentelemetry": "tracing",
    "mlx": "mlx_library",
    "mlx_lm": "mlx_library",
    "redis": "redis_store",
    "mooncake": "mooncake_store",
}

# Models, tokenizers and caches are objects of transformers only here; elsewhere they are seen
# through these. The last one makes models from configs, with random weights, to be timed.
MAY_IMPORT_TRANSFORMERS = {
    "attention",
    "cache",
    "cache_writing",
    "open_cache",
    "packing",
    "models",
    "outline",
    "public_shapes",
    "extracts",
}

HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "huggingface_hub",
    "matplotlib",
    "fastapi",
    "sklearn",
    "llguidance",
    "opentelemetry",
    "mlx",
)
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
MACHINE_PATH = re.compile(r"(?<![\w.~*-])/(?:root|home|work|opt|tmp|mnt|Users)/\w")
UNMERGED = re.compile(r"^(?:<{7}|>{7}) \w", re.MULTILINE)
REGISTRY_HOST = re.compile(r"(?:pypi|pythonhosted|npmjs|deb\.debian)\.(?:org|com)")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".json", ".yml", ".yaml", ".svg", ".txt", ""}
NOT_OURS = {
    ".git",
    ".venv",
    ".venv-oldest",
    ".venv-vllm",
    ".hypothesis",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "__pycache__",
    "build",
    "dist",
}

SOURCES = sorted(PACKAGE.rglob("*.py"))
SERVE_SOURCES = sorted((PACKAGE / "serve").rglob("*.py"))
ROUTING_SOURCES = sorted((PACKAGE / "serve" / "routing").glob("*.py"))
COMMAND_SOURCES = sorted((PACKAGE / "commands").glob("*.py"))
EXTERNAL_SOURCES = sorted((PACKAGE / "serve" / "external").glob("*.py"))


def name_of(source: Path) -> str:
    """kvlingo/cache.py -> cache; kvlingo/serve/router.py -> serve."""
    return source.relative_to(PACKAGE).parts[0].removesuffix(".py")


def serve_name_of(source: Path) -> str:
    """kvlingo/serve/engine.py -> engine; kvlingo/serve/routing/rules.py -> routing."""
    return source.relative_to(PACKAGE / "serve").parts[0].removesuffix(".py")


def tree_of(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"), str(source))


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield other
                yield from at_run_time(other)
            continue
        yield node
        yield from at_run_time(node)


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """Return the full names of all imported modules; `from a import b` counts as a and a.b."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layers_imported(source: Path) -> set[str]:
    names = (name.split(".") for name in imported(ast.walk(tree_of(source))))
    return {name[1] for name in names if name[0] == "kvlingo" and len(name) > 1} & set(ORDER)


def test_every_module_has_its_place_in_the_order() -> None:
    modules = {name_of(source) for source in SOURCES} - {"__init__", "__main__", "serve"}
    assert modules <= set(ORDER), "give the new module its place in ORDER"
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_a_module_imports_only_from_those_above_it(source: Path) -> None:
    name = name_of(source)
    if name not in ORDER:
        return
    beside = {name} if name == "commands" else set()  # its modules have an order of their own
    below = {other for other in layers_imported(source) - beside if ORDER.index(other) >= ORDER.index(name)}
    assert not below, f"{name} imports from below: {sorted(below)}"


def test_every_module_of_the_gateway_has_its_place_in_its_order() -> None:
    modules = {serve_name_of(source) for source in SERVE_SOURCES} - {"__init__"}
    assert modules <= set(SERVE_ORDER), "give the new module its place in SERVE_ORDER"
    assert {source.stem for source in ROUTING_SOURCES} - {"__init__"} == set(ROUTING_ORDER)
    assert {source.stem for source in EXTERNAL_SOURCES} - {"__init__"} == set(EXTERNAL_ORDER)
    assert {source.stem for source in COMMAND_SOURCES} - {"__init__"} == set(COMMAND_ORDER)


def imported_below(source: Path, package: str, order: list[str], name: str) -> set[str]:
    """Return the modules of a package that `name` imports and that don't stand above it."""
    names = [found.split(".") for found in imported(ast.walk(tree_of(source)))]
    start = package.split(".")
    beside = {found[len(start)] for found in names if found[: len(start)] == start and len(found) > len(start)}
    place = order.index(name) if name in order else 0
    return {other for other in beside & set(order) - {name} if order.index(other) > place}


@pytest.mark.parametrize("source", SERVE_SOURCES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_a_module_of_the_gateway_imports_only_from_those_above_it(source: Path) -> None:
    names = [name.split(".") for name in imported(ast.walk(tree_of(source)))]
    assert not {("kvlingo", "cli"), ("kvlingo", "commands")} & {tuple(name[:2]) for name in names}
    below = imported_below(source, "kvlingo.serve", SERVE_ORDER, serve_name_of(source))
    assert not below, f"{source.stem} imports from below: {sorted(below)}"


@pytest.mark.parametrize("source", ROUTING_SOURCES, ids=lambda p: p.stem)
def test_a_router_imports_only_from_those_above_it(source: Path) -> None:
    below = imported_below(source, "kvlingo.serve.routing", ROUTING_ORDER, source.stem)
    assert not below, f"{source.stem} imports from below: {sorted(below)}"


@pytest.mark.parametrize("source", COMMAND_SOURCES, ids=lambda p: p.stem)
def test_a_command_imports_only_from_those_above_it(source: Path) -> None:
    below = imported_below(source, "kvlingo.commands", COMMAND_ORDER, source.stem)
    assert not below, f"{source.stem} imports from below: {sorted(below)}"


@pytest.mark.parametrize("source", EXTERNAL_SOURCES, ids=lambda p: p.stem)
def test_what_engines_share_imports_only_from_those_above_it(source: Path) -> None:
    below = imported_below(source, "kvlingo.serve.external", EXTERNAL_ORDER, source.stem)
    assert not below, f"{source.stem} imports from below: {sorted(below)}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_vllm_sits_in_one_module_that_nothing_imports(source: Path) -> None:
    names = imported(ast.walk(tree_of(source)))
    assert "kvlingo.serve.vllm" not in names
    assert "vllm" not in {name.split(".")[0] for name in names} or source.stem in MAY_IMPORT_VLLM


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_lm_eval_sits_in_two_modules(source: Path) -> None:
    names = imported(ast.walk(tree_of(source)))
    assert "kvlingo.harness_model" not in names
    assert "lm_eval" not in {name.split(".")[0] for name in names} or source.stem in MAY_IMPORT_LM_EVAL
    at_top = {name.split(".")[0] for name in imported(iter(tree_of(source).body))}
    assert "lm_eval" not in at_top or source.stem == "harness_model"


def test_the_order_is_seen_to_be_broken() -> None:
    engine = PACKAGE / "serve" / "engine.py"
    assert imported_below(engine, "kvlingo.serve", [*SERVE_ORDER[::-1]], "engine")


@pytest.mark.parametrize("source", SERVE_SOURCES, ids=lambda p: p.stem)
def test_the_web_framework_sits_in_one_module(source: Path) -> None:
    names = {name.split(".")[0] for name in imported(ast.walk(tree_of(source)))}
    assert not names & {"fastapi", "uvicorn"} or source.stem in MAY_IMPORT_FASTAPI


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_scikit_learn_sits_in_one_module(source: Path) -> None:
    tree = tree_of(source)
    named = any("sklearn" in ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call))
    at_top = {name.split(".")[0] for name in imported(iter(tree.body))}
    assert "sklearn" not in at_top, "import it where it is used: it is an extra"
    assert not named or source.stem in MAY_IMPORT_SKLEARN


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_an_extra_sits_in_one_module(source: Path) -> None:
    tree = tree_of(source)
    at_top, names = ({name.split(".")[0] for name in imported(nodes)} for nodes in (iter(tree.body), at_run_time(tree)))
    assert not at_top & set(EXTRAS), "import it where it is used: it is an extra"
    assert {EXTRAS[name] for name in names & set(EXTRAS)} <= {source.stem}


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_only_the_serve_command_imports_the_gateway(source: Path) -> None:
    if name_of(source) == "serve":
        return
    tree = tree_of(source)
    inside = tree.body if name_of(source) == "commands" else ast.walk(tree)  # the command imports it in its function
    assert not {name for name in imported(iter(inside)) if name.startswith("kvlingo.serve")}


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_transformers_sits_in_few_modules(source: Path) -> None:
    if name_of(source) in MAY_IMPORT_TRANSFORMERS:
        return
    names = {name.split(".")[0] for name in imported(at_run_time(tree_of(source)))}
    assert "transformers" not in names, "take the object untyped, or import under TYPE_CHECKING"


def loaded_by(code: str) -> set[str]:
    """Run `code` in a fresh interpreter; return which heavy packages it loaded."""
    tell = f"print('\\nloaded:', *(m for m in {HEAVY} if m in sys.modules))"
    code = f"import atexit, sys\natexit.register(lambda: {tell})\n{code}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, timeout=60)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.rsplit("loaded:", 1)[1].split())


def test_import_is_light() -> None:
    assert loaded_by("import kvlingo; kvlingo.__version__") == set()


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["fit", "--help"], ["demo", "--help"], ["serve", "--help"], ["route", "fit", "--help"]],
    ids=" ".join,
)
def test_help_is_light(arguments: list[str]) -> None:
    code = f"sys.argv = {['kvlingo', *arguments]}\nfrom kvlingo.cli import main\nmain()"
    assert loaded_by(code) == set()


def test_the_light_check_sees_a_heavy_import() -> None:
    assert "safetensors" in loaded_by("import safetensors")


def unsafe(tree: ast.Module) -> Iterator[str]:
    """Yield what could run code from a file or a hub."""
    for name in imported(ast.walk(tree)):
        if name.split(".")[0] in UNSAFE_MODULES:
            yield f"import of {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            yield f"line {node.lineno}: torch.load"
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
            if ast.unparse(node.value) == "False":
                continue
            yield f"line {node.value.lineno}: {ast.unparse(node.value)} for {node.arg}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec"):
            yield f"line {node.lineno}: {ast.unparse(node.func)}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_no_pickle_and_no_remote_code(source: Path) -> None:
    assert not list(unsafe(tree_of(source)))


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from joblib import load",
        "weights = torch.load(path)",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=flag)",
        "eval(text)",
    ],
)
def test_the_unsafe_check_sees(code: str) -> None:
    assert list(unsafe(ast.parse(code)))


def repo_texts() -> Iterator[tuple[Path, str]]:
    for path in sorted(REPO.rglob("*")):
        if NOT_OURS & set(path.relative_to(REPO).parts) or not path.is_file():
            continue
        if path.suffix in TEXT_SUFFIXES and ".egg-info" not in str(path):
            yield path, path.read_text(encoding="utf-8", errors="replace")


def test_no_path_of_a_machine_no_registry_host_and_nothing_unmerged() -> None:
    found = [
        f"{path.relative_to(REPO)}: {match.group()}"
        for path, text in repo_texts()
        for pattern in (MACHINE_PATH, REGISTRY_HOST, UNMERGED)
        for match in pattern.finditer(text)
    ]
    assert not found


def test_the_path_check_sees_a_path() -> None:
    slash = "/"
    assert MACHINE_PATH.search(f"open('{slash}home{slash}me/x')")
    assert not MACHINE_PATH.search("~/work/x and docs/work/x")
    assert UNMERGED.search("a\n" + 7 * "<" + " HEAD\n")
