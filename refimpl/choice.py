"""What `--allreduce auto` and `--bucket-mb 0` mean: a fixed table, by ranks and bytes.

Both decide the order in which floats are added, so they belong to a run: taken from here, printed
and logged, never measured at the start. `python -m refimpl.bench allreduce` proposes lines for it.
"""
ANY = 1 << 62
# (most ranks, bytes of a bucket): between nodes adding waits for the links, and buckets hide behind
# backward; more ranks mean more rounds, which larger buckets pay less often (docs/scale.md)
BUCKETS = ((256, 8_000_000), (ANY, 16_000_000))
# (most ranks, most bytes of a bucket, algorithm): the first line that fits. Short messages wait for
# rounds, of which halving/doubling has the fewest; the torus is Mikami's (docs/collectives.md)
BETWEEN_NODES = ((ANY, 1 << 20, "halving_doubling"), (ANY, ANY, "torus"))
# inside one node, on its CPUs: shared memory, at every size and for 2, 4 and 8 ranks the fastest
ONE_CPU_NODE = ((ANY, ANY, "window"),)


def bucket_bytes(ranks: int) -> int:
    return next(nbytes for most, nbytes in BUCKETS if ranks <= most)


def algorithm(ranks: int, nbytes: int, one_cpu_node: bool) -> str:
    """The algorithm for buckets of `nbytes` bytes."""
    return next(name for most, largest, name in (ONE_CPU_NODE if one_cpu_node else BETWEEN_NODES)
                if ranks <= most and nbytes <= largest)
