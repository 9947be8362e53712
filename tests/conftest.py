"""A test that takes `comm` runs on real ranks, once per MPI and rank count; the rest is plain pytest.

`@pytest.mark.ranks(1, 2, 5)` chooses the rank counts. All such tests of one file share one mpirun
per (MPI, rank count); `tests/ranks.py` is what the ranks run. A failure on any rank fails that
test with that rank's traceback; the tests behind it are then started again in a fresh launch.
"""
import json
import pathlib
import tempfile

import pytest

from tests.mpi import flavours, mpirun

DEFAULT_RANKS, SECONDS = (1, 2, 3, 4), 120
_results: dict[tuple, dict[str, str]] = {}  # (file, mpi, ranks) -> test name -> "" or failure


def pytest_configure(config):
    config.addinivalue_line("markers", "ranks(*counts): rank counts of a test that takes `comm`")
    config.addinivalue_line("markers", "slow: more than a few seconds")


def pytest_generate_tests(metafunc):
    if "comm" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("ranks")
        cases = [(mpi, n) for mpi in flavours() for n in (mark.args if mark else DEFAULT_RANKS)]
        metafunc.parametrize("comm", cases, ids=[f"{m}-{n}" for m, n in cases], indirect=True)


@pytest.fixture
def comm(request):
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if "comm" not in pyfuncitem.fixturenames:
        return None
    mpi, ranks = pyfuncitem.callspec.params["comm"]
    key = (str(pyfuncitem.path), mpi, ranks)
    if key not in _results:
        wanted = [i.originalname for i in pyfuncitem.session.items
                  if i.path == pyfuncitem.path and getattr(i, "callspec", None)
                  and i.callspec.params.get("comm") == (mpi, ranks)]
        _results[key] = _run(*key, wanted)
    failure = _results[key][pyfuncitem.originalname]
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


def _run(path: str, mpi: str, ranks: int, wanted: list[str]) -> dict[str, str]:
    """Launch until every wanted test has an outcome."""
    outcome: dict[str, str] = {}
    while missing := [name for name in wanted if name not in outcome]:
        with tempfile.TemporaryDirectory() as folder:
            job = mpirun(mpi, ranks, "-m", "tests.ranks", path, folder, *missing, timeout=SECONDS)
            reports = [json.loads(line) for file in sorted(pathlib.Path(folder).iterdir())
                       for line in file.read_text().splitlines()]
        for name in missing:  # up to the first one that not every rank passed
            mine = [r for r in reports if r["test"] == name]
            failed = [f"rank {r['rank']}:\n{r['failure']}" for r in mine if r["failure"]]
            if len(mine) == ranks and not failed:
                outcome[name] = ""
                continue
            silent = sorted(set(range(ranks)) - {r["rank"] for r in mine})
            outcome[name] = "\n".join(failed) or (
                f"ranks {silent} did not finish (exit code {job.returncode})\n"
                f"{job.stdout[-2000:]}\n{job.stderr[-4000:]}")
            break
    return outcome
