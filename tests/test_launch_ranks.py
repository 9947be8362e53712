"""Cores per rank and texts, as the ranks of one node agree on them."""
import os

import pytest

from refimpl.device import free_cores
from refimpl.collective.guard import gather_text


@pytest.mark.ranks(1, 3)
def test_ranks_share_the_cores_they_are_bound_to(comm):
    before = os.sched_getaffinity(0)
    assert free_cores(comm) == max(1, len(before) // comm.size)
    os.sched_setaffinity(0, {sorted(before)[comm.rank % len(before)]})
    try:
        assert free_cores(comm) == 1  # never 0, also where two ranks are bound to one core
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.ranks(3)
def test_texts_come_by_rank_whatever_their_length(comm):
    assert gather_text(comm, "x" * 300 * comm.rank) == ["", "x" * 300, "x" * 600]
    assert gather_text(comm, "no text: \udcff") == ["no text: \udcff"] * 3
