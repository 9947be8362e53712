"""The figures of docs/scale.md are what the commands print now."""
import contextlib
import io
import re
import runpy
import sys

import pytest

from refimpl.collective import default_shape
from refimpl.simulate.__main__ import main
from refimpl.simulate.cost import Cluster
from refimpl.simulate.form import closed_form
from tests.mpi import ROOT

PAGE = (ROOT / "docs" / "scale.md").read_text()
ABCI = Cluster("abci")


def milliseconds(cluster, algorithm, ranks, shape=None):
    shape = shape or default_shape(ranks, cluster.per_node(ranks))
    return 1e3 * closed_form(cluster, algorithm, ranks, 51e6, shape)["seconds"]


def table(first_cell: str) -> list[list[str]]:
    """Rows of cells of the table whose head begins so, the line under the head left out."""
    lines = PAGE[PAGE.index(f"\n| {first_cell} |") + 1:].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in [lines[0], *lines[2:]]]


@pytest.mark.slow
def test_the_papers_table_is_what_the_command_prints(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["simulate", "papers"])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main() == 0
    shown = re.search(r"\$ python -m refimpl.simulate papers\n(.*?)```", PAGE, re.S)[1]
    assert [line.rstrip() for line in out.getvalue().splitlines()] == shown.splitlines()


def test_the_table_of_algorithms_is_the_closed_forms():
    head, *rows = table("GPUs")
    for (_, *cells), algorithm in zip(rows, ("ring", "torus", "halving_doubling", "hierarchical")):
        assert cells == [f"{milliseconds(ABCI, algorithm, int(n)):.1f}" for n in head[1:]]


def test_the_table_of_shapes_is_the_closed_forms_and_holds_the_best_of_all():
    low, high = ABCI.ranges["between.latency"]
    latencies = [ABCI.but(between__latency=at) for at in (low, ABCI["between.latency"], high)]
    head, *rows = table("1088 GPUs")
    for first, ranks in ((0, 1088), (5, 3456)):
        columns = {row[first]: row[first + 1:first + 4] for row in rows}
        for shape, cells in columns.items():
            grid = tuple(map(int, shape.split(" x ")))
            assert cells == [f"{milliseconds(c, 'torus', ranks, grid):.1f}" for c in latencies]
        for k, cluster in enumerate(latencies):
            every = [milliseconds(cluster, "torus", ranks, (ranks // c, c))
                     for c in range(1, ranks + 1) if ranks % c == 0]
            assert min(float(cells[k]) for cells in columns.values()) < min(every) + 0.15


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["shared.openmpi", "shared.mpich", "hosts"])
def test_the_fits_and_their_residuals_are_what_docs_fit_prints(monkeypatch, rows):
    block = PAGE[PAGE.index(f"$ python docs/fit.py docs/rows/{rows}"):].split("```")[0]
    line, *shown = block.replace("\\\n", " ").splitlines()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", line.split()[2:])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert runpy.run_path("docs/fit.py")["main"]() == 0
    printed = out.getvalue().splitlines()
    assert {*shown} <= {*printed} and printed[-1] == shown[-1]
