"""MPI's own Allreduce behind the same signature: the yardstick. Its order of addition is not ours."""
from .exchange import library_allreduce


def allreduce(buffer, comm, wire=None):
    """Sum `buffer` over the ranks of `comm`, in place; no 16-bit types, no wire."""
    assert wire is None
    library_allreduce(buffer, comm)
