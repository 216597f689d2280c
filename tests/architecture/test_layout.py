"""The tree is what docs/architecture.md draws, no folder is too wide, and no module imports itself by way of others."""

import ast
import graphlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "asyncrl"
MOST_FILES = 12


def modules() -> dict[str, Path]:
    """Every module of the package, by dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def files_of(folder: Path) -> set[str]:
    """Names of a folder's modules, packages left out."""
    return {path.stem for path in folder.glob("*.py")} - {"__init__"}


def test_no_folder_holds_more_than_twelve_files():
    folders = {path.parent for top in (PACKAGE, ROOT / "tests") for path in top.rglob("*.py")}
    wide = {str(folder.relative_to(ROOT)): len(files_of(folder)) for folder in folders if len(files_of(folder)) > MOST_FILES}
    assert wide == {}, f"folders of more than {MOST_FILES} files: {wide}"


def drawn() -> dict[str, set[str]]:
    """The folders of docs/architecture.md's drawing, each with its files: names in brackets behind what the folder is for."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawing = page.partition("## Layout")[2].partition("```\n")[2].partition("\n```")[0]
    layout: dict[str, set[str]] = {}
    for entry in re.split(r"^(?=  [\w/]+/ )", drawing, flags=re.MULTILINE):
        folder = re.match(r"  ([\w/]+)/ ", entry)
        names = re.findall(r"\[([^\]]*)\]", entry)
        layout[folder[1] if folder else "."] = {name for group in names for name in group.split()}
    return layout


def test_the_tree_is_what_the_architecture_page_draws():
    folders = [PACKAGE, *(init.parent for init in PACKAGE.rglob("*/__init__.py"))]
    on_disk = {str(folder.relative_to(PACKAGE)): files_of(folder) for folder in folders}
    layout = drawn()
    assert sorted(on_disk) == sorted(layout), "folders"
    differing = {folder: sorted(on_disk[folder] ^ layout[folder]) for folder in on_disk if on_disk[folder] != layout[folder]}
    assert differing == {}, "files that are in the drawing or on the disk only"


def imports_of(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of ours that a module names: by import, for type checkers only, within functions, or by string.

    A string behind "-m" starts a process, which imports nothing here.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in known else node.module for alias in node.names
            }
        for field in ("elts", "args"):
            values = getattr(node, field, None)
            for before, value in zip([None, *values], values, strict=False) if isinstance(values, list) else ():
                if isinstance(before, ast.Constant) and before.value == "-m" and isinstance(value, ast.Constant):
                    value.value = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"asyncrl(\.\w+)+(:\w+)?", node.value):
            found.add(node.value.partition(":")[0])
    return (found & known.keys()) - {name, "asyncrl"}


def test_no_import_cycle_not_even_for_type_checkers_or_by_string():
    known = modules()
    graph = {name: imports_of(name, path, known) for name, path in known.items()}
    assert len(graph["asyncrl.pipeline"]) > 10, "nothing was looked at"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the cycle


def test_no_file_says_who_calls_it():
    saying = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if re.search(r"[Cc]alled by \S+\.py", path.read_text())
    }
    assert saying == set()
