"""MPI's own Allreduce behind the same signature, as yardstick; its order of addition is its own."""
from . import buffers
from .exchange import SEGMENT, traffic, waiting

LIMIT = 1 << 30  # bytes of one call: from 2^31 on Open MPI 5.0 refuses


def allreduce(buffer, comm, wire=None):
    """Sum `buffer` over the ranks of `comm`, in place; no 16-bit types, no wire."""
    from mpi4py import MPI
    staged = buffers.staged(buffer)
    for piece in buffers.pieces(buffer, SEGMENT if staged else LIMIT):
        where = traffic().packed(piece, None, 0) if staged else piece
        buffers.synchronise(piece)
        with waiting("MPI_Allreduce", comm):
            comm.Allreduce(MPI.IN_PLACE, where)
        if staged:
            buffers.land(where, piece, False)
    traffic().count("MPI_Allreduce", buffer.nbytes)
