"""Real allreduces as the oracle sees them: python -m tests.oracle_subjects prints the table.

Each is f(buffer, comm), in place or returning the sum, and could be checked by its name:
    mpirun -np 6 python -m refimpl.oracle identify tests.oracle_subjects:mpi
"""
import datetime
import json
import os
import sys
import tempfile

import numpy as np

from refimpl.errors import UsageError
from refimpl.oracle.cases import Case
from refimpl.oracle.check import attempt, call, examine, make
from refimpl.oracle.explain import explain
from refimpl.oracle.identify import identify, load_function, probes


def mpi(x, comm):
    """MPI_Allreduce of a NumPy buffer; which algorithm, the environment says."""
    from mpi4py import MPI
    comm.Allreduce(MPI.IN_PLACE, x)


def pickled(x, comm):
    """mpi4py's lower-case allreduce: objects are pickled and added by Python."""
    return comm.allreduce(x)


def gathered(x, comm):
    """Every rank gets all buffers and adds them in rank order."""
    return sum(comm.allgather(x)[1:], comm.bcast(x))


def gloo(x, comm):
    """torch.distributed over Gloo; uint16 words go as torch.bfloat16."""
    import torch
    import torch.distributed as dist
    if not dist.is_initialized():
        path = comm.bcast(tempfile.mkdtemp() if not comm.Get_rank() else None)
        dist.init_process_group("gloo", f"file://{path}/rendezvous", datetime.timedelta(seconds=30),
                                comm.Get_size(), comm.Get_rank())
    tensor = torch.from_numpy(x)
    dist.all_reduce(tensor.view(torch.bfloat16) if x.dtype == np.uint16 else tensor)


def passed_around(x, comm):
    """Broken: each rank adds what comes by, its own first; the ranks end with different bits."""
    total, moving = x.copy(), x.copy()
    for _ in range(comm.Get_size() - 1):
        moving = comm.sendrecv(moving, (comm.Get_rank() - 1) % comm.Get_size())
        total = total + moving
    return total


def mean(x, comm):
    """Broken: divides, as many trainers do."""
    return (comm.allreduce(x) / comm.Get_size()).astype(x.dtype)


def forgets_rank_0(x, comm):
    """Broken: the root's own part is missing."""
    return comm.allreduce(x) - comm.bcast(x)


def through_float16(x, comm):
    """Broken: 16 bits on the wire, undeclared."""
    return comm.allreduce(x.astype(np.float16)).astype(x.dtype)


def raises(x, comm):
    """Broken: takes nothing."""
    raise TypeError("no such thing")


OPENMPI = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_priority": "100"}
MPICH = {"MPIR_CVAR_DEVICE_COLLECTIVES": "none"}
SUBJECTS = [  # what the table says, MPI, function, environment
    ("MPI_Allreduce, as it comes", "openmpi", "mpi", {}), *(
        (f"MPI_Allreduce, algorithm {number} ({name})", "openmpi", "mpi",
         OPENMPI | {"OMPI_MCA_coll_tuned_allreduce_algorithm": str(number)})
        for number, name in enumerate(("linear", "reduce + bcast", "recursive doubling", "ring",
                                       "segmented ring", "Rabenseifner"), 1)),
    ("MPI_Allreduce, as it comes", "mpich", "mpi", {}), *(
        (f"MPI_Allreduce, {name}", "mpich", "mpi",
         MPICH | {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": name})
        for name in ("recursive_doubling", "reduce_scatter_allgather", "tree", "recexch", "ring")),
    ("mpi4py's pickled allreduce", "mpich", "pickled", {}),
    ("allgather, then added in rank order", "mpich", "gathered", {}),
    ("torch.distributed, Gloo", "mpich", "gloo", {}),
    ("broken: each rank its own first", "mpich", "passed_around", {}),
    ("broken: float16 on the wire", "mpich", "through_float16", {}),
    ("broken: mean", "mpich", "mean", {}),
    ("broken: rank 0 is missing", "mpich", "forgets_rank_0", {})]


def look(name: str) -> dict:
    """On every rank: order, agreement and what happens in each type; the same answer everywhere."""
    from mpi4py import MPI
    comm, f = MPI.COMM_WORLD, load_function(f"tests.oracle_subjects:{name}")
    size, lines = comm.size, order_of(f, comm, "float32")
    unknown = lines[-1].startswith("= none") or len(lines) == 1
    seen = {"order": lines[0].rpartition(": ")[2] if unknown else lines[-1][2:]}
    seen["order"] = "an order per rank" if "disagree" in lines[0] else seen["order"]
    agree = [attempt(f, comm, case) for case in make(size, "agree")]
    seen["agree"] = "no" if any(v.wrong for v in agree) else "yes"
    seen["float32"] = outcome(f, comm, Case("float32", size, 13, "exact", "place"))
    if seen["float32"] == "right":
        seen["float32"] = outcome(f, comm, Case("float32", size, 13, "bounded", "spread"))
    for dtype in ("float16", "bfloat16"):
        seen[dtype] = outcome(f, comm, Case(dtype, size, 32, "exact", "exact"))
        if seen[dtype] == "right":
            same_order = order_of(f, comm, dtype) == lines
            seen[dtype] += ", rounds every sum" if same_order else ", sums kept wider"
    return seen


def order_of(f, comm, dtype: str) -> list[str]:
    cases = probes(comm.size, 4 * comm.size, dtype)
    return identify(cases, [call(f, comm, case) for case in cases])


def outcome(f, comm, case) -> str:
    try:
        got = call(f, comm, case)
    except UsageError:
        return "refused"
    if not examine(case, got).wrong:
        return "right"
    who, what, *more = explain(case, got)[0].split(": ")
    return who if "disagree" in who else more[0] if what.startswith("elements") else what


def table(ranks: int = 5) -> str:
    """The Markdown table of the documentation."""
    from tests.mpi import flavours, mpirun
    rows = ["| subject | MPI | adds | ranks agree | float32 | float16 | bfloat16 words |",
            "|---|---|---|---|---|---|---|"]
    for text, flavour, name, env in SUBJECTS:
        if flavour in flavours():
            job = mpirun(flavour, ranks, "-m", "tests.oracle_subjects", name, env=env, timeout=100)
            last = job.stdout.strip().splitlines()[-1:] or ["{}"]
            seen = json.loads(last[0]) if job.returncode == 0 else {"order": "did not run"}
            columns = ("order", "agree", "float32", "float16", "bfloat16")
            cells = [seen.get(key, "") for key in columns]
            rows.append(f"| {text} | {flavour} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        answers = [look(name) for name in sys.argv[1:]]
        from mpi4py import MPI
        if not MPI.COMM_WORLD.rank:
            print(*map(json.dumps, answers), sep="\n", flush=True)
        os._exit(0) if "gloo" in sys.argv else None  # Gloo's threads may outlive MPI_Finalize
    else:
        print(table())
