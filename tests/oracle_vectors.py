"""The committed cases, from a table: python -m tests.oracle_vectors writes refimpl/oracle/vectors.

Ids never change their meaning; a fix is a new id. notes: flag -> which bug its cases catch.
"""
import csv
import json

from refimpl.oracle.cases import Case, dump
from tests.mpi import ROOT

PLACE = ROOT / "refimpl" / "oracle" / "vectors"
TABLE, NOTES = ROOT / "tests" / "oracle_vectors.csv", ROOT / "tests" / "oracle_notes.json"
FILES = ("census", "place", "exact", "sizes", "spread", "cancel", "special")


def suite(name: str) -> list[Case]:
    """The cases of one file."""
    cases = []
    with TABLE.open(newline="") as table:
        for row in csv.DictReader(table):
            if row.pop("file") == name:
                flags = tuple(row.pop("flags").split())
                numbers = {key: int(row.pop(key)) for key in ("id", "ranks", "count", "seed")}
                cases.append(Case(**numbers, flags=flags, **{k: v for k, v in row.items() if v}))
    return cases


def notes() -> dict:
    return json.loads(NOTES.read_text())


if __name__ == "__main__":
    for file in FILES:
        (PLACE / f"{file}.json").write_text(dump(suite(file), notes()) + "\n")
