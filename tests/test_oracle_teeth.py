"""Every planted bug is caught by the vector whose flag claims it; no vector is idle."""
import functools

import pytest

from refimpl.errors import UsageError
from refimpl.oracle.cases import load
from refimpl.oracle.check import examine, sized
from tests.oracle_bugs import BUGS, right
from tests.oracle_vectors import FILES, PLACE, notes, suite

VECTORS = [case for name in FILES for case in suite(name)]


def strikes(name, case):
    """Can this bug show in this case: has the case its flag, and a dtype it strikes?"""
    flag, dtypes, _ = BUGS[name]
    return flag in case.flags and case.dtype in dtypes


@functools.cache
def caught(name, number):
    case = next(case for case in VECTORS if case.id == number)
    try:
        got = BUGS[name][2](case)
        return bool(examine(case, [sized(case, x, "bug") for x in got]).wrong)
    except UsageError:
        return True  # refused for its length


def test_correct_code_passes_everything():
    for case in VECTORS:
        if case.count < 10 ** 6:
            assert not examine(case, right(case)).wrong, case.id


@pytest.mark.parametrize("name", BUGS)
def test_the_vectors_whose_flag_claims_it_catch(name):
    struck = [case for case in VECTORS if strikes(name, case)]
    assert struck
    for case in struck:
        assert caught(name, case.id), f"{name}: case {case.id} does not see it"


def test_every_flag_has_a_bug_and_a_note():
    used = {flag for case in VECTORS for flag in case.flags}
    assert used == {flag for flag, _, _ in BUGS.values()} == set(notes())


def test_every_vector_catches_something_new():
    seen = set()
    for case in VECTORS:
        short = case.count < case.ranks and case.count
        kind = (case.dtype, case.order, case.wire, short)
        catches = {(name, *kind) for name in BUGS if strikes(name, case) and caught(name, case.id)}
        assert catches - seen, f"case {case.id} catches nothing that an earlier one does not"
        seen |= catches


def test_ids_are_unique_over_all_files():
    assert len({case.id for case in VECTORS}) == len(VECTORS)


@pytest.mark.parametrize("name", FILES)
def test_committed_files_say_what_the_table_says(name):
    assert [case.id for case in load(PLACE / f"{name}.json")] == [case.id for case in suite(name)]
