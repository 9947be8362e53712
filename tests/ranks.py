"""What each rank runs: python -m tests.ranks FILE FOLDER TEST... (started by conftest.py)."""
import importlib.util
import json
import os
import pathlib
import sys
import traceback


def main(path: str, folder: str, *names: str) -> None:
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with open(pathlib.Path(folder) / f"rank{comm.rank:05d}", "w") as report:
        try:
            spec.loader.exec_module(module)
        except BaseException:
            _write(report, names[0], comm.rank, traceback.format_exc())
            comm.Abort(1)
        for name in names:
            comm.Barrier()
            try:
                getattr(module, name)(comm)
                _write(report, name, comm.rank, "")
            except BaseException:
                _write(report, name, comm.rank, traceback.format_exc())
                comm.Abort(1)  # the others may wait for this rank for ever


def _write(report, name: str, rank: int, failure: str) -> None:
    report.write(json.dumps({"test": name, "rank": rank, "failure": failure}) + "\n")
    report.flush()
    os.fsync(report.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
