"""Rules of design/architecture.md that import-linter cannot say."""

import ast
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("service", "trainer", "yoro")
LONGEST_FILE = 300
ONE_PAGE = {"service/database/tables.py"}
"""The schema is read as a whole."""
FORBIDDEN_NAMES = {"utils", "helpers", "common", "manager", "base", "misc"}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def calls(tree: ast.Module, name: str) -> list[int]:
    """Lines on which something called `name` is called."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
    ]


def test_only_the_engine_commits() -> None:
    found = {str(path) for path, tree in sources() if calls(tree, "commit")}
    # the Kafka client commits offsets, which is no transaction
    assert found == {"service/database/engine.py", "service/ingest/kafka.py"}


def test_the_environment_is_read_in_one_place() -> None:
    # the supervisor hands its environment on to its children without reading it
    found = {
        str(path)
        for path, tree in sources()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"))
        or (isinstance(node, ast.Name) and node.id in ("environ", "getenv"))
    }
    assert found <= {"service/settings.py", "yoro/supervisor.py"}


def test_kafka_is_imported_in_one_place() -> None:
    found = {str(path) for path, tree in sources() if _imports(tree, "kafka")}
    assert found <= {"service/ingest/kafka.py"}


def test_torch_stays_out_of_the_service_but_for_the_encoder() -> None:
    heavy = ("torch", "transformers", "peft", "sentence_transformers")
    found = {
        str(path)
        for path, tree in sources()
        if path.parts[0] == "service" and any(_imports(tree, name) for name in heavy)
    }
    assert found <= {"service/baselines/embedding.py"}


def test_no_module_is_named_after_nothing() -> None:
    assert [path for path, _ in sources() if path.stem in FORBIDDEN_NAMES] == []


def test_files_are_short_enough_to_read() -> None:
    long = {
        str(path): len((ROOT / path).read_text().splitlines())
        for path, _ in sources()
        if str(path) not in ONE_PAGE
    }
    assert {path: lines for path, lines in long.items() if lines > LONGEST_FILE} == {}


def test_every_module_says_what_it_is_for() -> None:
    assert [str(path) for path, tree in sources() if not ast.get_docstring(tree)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_goes_round_in_a_circle(package: str) -> None:
    graph = grimp.build_graph(package)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        for imported in graph.find_modules_directly_imported_by(module):
            visit(imported, (*path, module))
        done.add(module)

    for module in graph.modules:
        visit(module, ())


def _imports(tree: ast.Module, name: str) -> bool:
    for node in ast.walk(tree):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
        if any(found == name or found.startswith(name + ".") for found in names):
            return True
    return False
