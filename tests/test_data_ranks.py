"""What ranks do together about files: the same list on all, the same policy for bad ones."""
import zipfile

import numpy as np
import pytest
import torch

from refimpl.data.listing import Listing
from refimpl.errors import UsageError
from tests.test_equivalence import folder, trained


@pytest.mark.ranks(2)
def test_a_listing_that_lacks_a_file_on_one_rank_is_refused_on_all(comm):
    where, whole = folder(comm), Listing._zip
    if comm.rank == 1:
        Listing._zip = lambda self, *which: list(whole(self, *which))[:-1]
    try:
        with pytest.raises(UsageError, match="differ in train: rank 1 has"):
            trained(comm, where, "--workers", "3")
    finally:
        Listing._zip = whole


@pytest.mark.ranks(2, 3)
def test_bad_images_are_replaced_alike_for_every_number_of_ranks(comm):
    from mpi4py import MPI
    where = folder(comm)
    if comm.rank == 0:
        zipfile.ZipFile(where / "data.zip").extractall(where / "tree")
        for path in sorted((where / "tree/train").rglob("*.jpg"))[::5]:
            path.write_bytes(b"")
    comm.Barrier()
    more = ("--data", str(where / "tree"), "--workers", "3", "--bad-images", "replace", "--sum", "exact")
    together = trained(comm, where, *more)
    alone = trained(MPI.COMM_SELF, where, *more, "--out", str(where / str(comm.rank)))
    for p, q in zip(together.model.parameters(), alone.model.parameters()):
        assert torch.equal(p, q)
    replaced = np.empty(1, np.int64)
    comm.Allreduce(np.array([together.log.replaced]), replaced)
    assert replaced[0] == alone.log.replaced > 0
