"""The shape of the house: who may import whom, how large a room may be, what must not be said."""
import ast
import pathlib
import re
import subprocess
import sys

import pytest

from tests.mpi import ROOT

PACKAGE = ROOT / "refimpl"
FILES = sorted(PACKAGE.rglob("*.py"))
# part -> what it must not import (DESIGN 4); refimpl.errors is everybody's
FORBIDDEN = {
    "collective": ("torch", "refimpl.oracle", "refimpl.simulate", "refimpl.data", "refimpl.train",
                   "refimpl.config", "refimpl.run", "refimpl.gradients"),
    "oracle": ("torch", "cupy", "refimpl.collective", "refimpl.simulate", "refimpl.train",
               "refimpl.run", "refimpl.gradients"),
    "simulate": ("torch", "cupy", "mpi4py", "refimpl.oracle", "refimpl.train", "refimpl.run"),
    "data": ("mpi4py", "cupy", "refimpl.collective", "refimpl.oracle", "refimpl.train",
             "refimpl.run")}
# lines of each part: ceilings, which only go down. The design meant 700, 500, 800 and 600; what was
# asked of the parts since took more
BUDGET = {"collective": 1000, "simulate": 1150, "oracle": 1330, "data": 1226}


def imports(path: pathlib.Path, everywhere: bool = True):
    """(module, line) of every import, or of those that run when the file is imported."""
    tree = ast.parse(path.read_text())
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda))
              for n in ast.walk(f) if not isinstance(f, ast.Lambda)}
    for node in ast.walk(tree):
        if not everywhere and id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = path.relative_to(ROOT).with_suffix("").parts[:-node.level]
                base = ".".join((*parts, *filter(None, [node.module])))
            yield from ((f"{base}.{name.name}", node.lineno) for name in node.names)


@pytest.mark.parametrize("part", FORBIDDEN)
def test_imports_run_downward_only(part):
    for path in (PACKAGE / part).rglob("*.py"):
        for module, line in imports(path):
            for banned in FORBIDDEN[part]:
                assert not (module + ".").startswith(banned + "."), f"{path}:{line} {module}"


def test_mpi4py_is_imported_inside_functions_only_and_cupy_in_one_file():
    cupy = set()
    for path in FILES:
        assert not [m for m, _ in imports(path, False) if m.startswith("mpi4py")], path
        if any(m == "cupy" or m.startswith("cupy.") for m, _ in imports(path)):
            cupy.add(path.name)
    assert cupy <= {"buffers.py"}


def test_only_exchange_and_its_declared_neighbours_touch_messages():
    """Point-to-point calls stand in exchange.py; MPI's own Allreduce in mpi.py and small counts."""
    for path in (PACKAGE / "collective").glob("*.py"):
        calls = set(re.findall(r"\.(I?send|I?recv|Sendrecv|Isend|Irecv)\(", path.read_text()))
        assert not calls or path.name == "exchange.py", (path, calls)


def test_data_travels_by_upper_case_calls_only():
    lower = re.compile(r"\b(comm|row|column|node|cart|world)\.(send|recv|bcast|reduce|allreduce|"
                       r"gather|allgather|scatter|alltoall|sendrecv|isend|irecv)\(")
    for path in FILES:
        if path.parent.name != "oracle":  # its subjects include mpi4py's pickled allreduce
            assert not lower.search(path.read_text()), path


@pytest.mark.parametrize("part,lines", BUDGET.items())
def test_parts_stay_within_their_budgets(part, lines):
    count = sum(len(p.read_text().splitlines()) for p in (PACKAGE / part).rglob("*.py"))
    assert count <= lines, f"{part} has {count} lines, its ceiling is {lines}"


def test_no_file_and_no_function_is_too_large():
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= 275, path
        assert max(map(len, text.splitlines()), default=0) <= 110, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 50, f"{path}:{node.lineno} {node.name}"


def test_every_file_says_what_it_is_for():
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())) or not path.read_text(), path


def test_a_dry_run_needs_neither_torch_nor_mpi():
    code = ("import sys; sys.modules.update(torch=None, mpi4py=None, cupy=None)\n"
            "from refimpl.train import main; sys.exit(main(['--recipe', 'goyal_8k', '--dry-run']))")
    job = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert job.returncode == 0 and "8192" in job.stdout, job.stderr
