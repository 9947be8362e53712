"""Can this MPI read device memory? Every implementation is asked in its own way."""
import ctypes
import os

SETTINGS = {"cray": "MPICH_GPU_SUPPORT_ENABLED", "mvapich": "MV2_USE_CUDA"}  # 1, or it cannot


def mpi_reads_device_memory(version=None, env=os.environ, query=None) -> bool:
    """Ask MPI; the arguments (its version text, environment, MPIX query) are for tests.

    Cray MPICH and MVAPICH tell by a variable they must be started with; Open MPI and MPICH by
    MPIX_Query_cuda_support, which MPICH's own variable can overrule. Unknown means no.
    """
    if version is None:
        from mpi4py import MPI
        version = MPI.Get_library_version()
    for vendor, variable in SETTINGS.items():
        if vendor in version.lower():
            return env.get(variable, "0") == "1"
    if "mpich" in version.lower() and env.get("MPIR_CVAR_ENABLE_GPU", "1") == "0":
        return False
    return bool((query or _query)())


def _query() -> int:
    """MPIX_Query_cuda_support of the MPI that is loaded; 0 where there is none."""
    from mpi4py import MPI
    for path in (None, os.environ.get("MPI4PY_LIBMPI"), MPI.__file__):  # None: all that is loaded
        try:
            return ctypes.CDLL(path).MPIX_Query_cuda_support()
        except (OSError, AttributeError):
            continue
    return 0
