"""2D-torus allreduce (Mikami et al. 2018): the ring, along rows and along columns.

    2 x 2, the buffer in two halves; letters are ranks           a b     row 0
                                                                 c d     row 1
    1. reduce-scatter along the row   b owns half 0 of a+b, a half 1; d half 0 of c+d, c half 1
    2. allreduce along the column     b and d: half 0 of (a+b)+(c+d), each adding a quarter; a and c: half 1
    3. all-gather along the row       everyone: both halves

Order of addition: a fold of folds. Chunk j of the row phase is in every row the left fold from
column j on; its sub-chunk i is the left fold of these row sums from row i on.
Costs per rank: 2(C-1) + 2(R-1) messages (the paper counts 2(X-1), the row phases alone), 2(N-1)/N
of the buffer's bytes, as the ring.
"""
from . import ring, window


def allreduce(buffer, grid, wire=None):
    """Sum `buffer` over all ranks of the grid, in place, the same bits everywhere."""
    along = window if window.find(buffer, grid.row, wire) else ring  # the same bits
    owned = along.reduce_scatter(buffer, grid.row, wire, phase="row reduce-scatter")
    ring.allreduce(owned, grid.column, wire, phase="column ")
    along.all_gather(buffer, grid.row, wire, phase="row all-gather")
