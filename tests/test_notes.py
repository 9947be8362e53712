"""PAPER_NOTES.md names files, functions and tests; each exists."""
import ast
import re

import pytest

from tests.mpi import ROOT

NOTES = (ROOT / "PAPER_NOTES.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`((?:refimpl|tests|docs|kernels)/[\w./]+)(?::([\w.]+))?`", NOTES)))


def names(path) -> set[str]:
    """Functions, classes and their methods, as `function`, `Class` and `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        found.add(getattr(node, "name", ""))
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body
                      if isinstance(inner, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("file, name", NAMED, ids=map(":".join, NAMED))
def test_what_the_notes_name_exists(file, name):
    assert (ROOT / file).is_file()
    assert not name or name in names(ROOT / file)


def test_every_row_names_code_and_every_test_is_a_test():
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in NOTES.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if len(row) == 5 and row[2] not in ("code", "---")]
    assert len(rows) > 30 and all(row[2].startswith("`refimpl/") for row in rows)
    assert all(re.fullmatch(r"|(`tests/test_\w+\.py:test_\w+`(, )?)+", row[3]) for row in rows)
