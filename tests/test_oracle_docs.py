"""The quick start of docs/oracle.md, as a reader would do it: compile, run, check."""
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.mpi import ROOT, flavours

PAGE = (ROOT / "docs" / "oracle.md").read_text()
ENV = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
       "PYTHONPATH": str(ROOT)}


@pytest.fixture
def quick_start(tmp_path):
    if not (shutil.which("mpicxx", path=ENV["PATH"]) and shutil.which("g++")
            and "mpich" in flavours()):
        pytest.skip("needs g++ and MPICH's mpicxx")
    source = re.search(r"```cpp\n(.*?)```", PAGE, re.S)[1]
    commands = re.search(r"Compile, run, check:\n\n```sh\n(.*?)```", PAGE, re.S)[1]

    place = tmp_path / "prefix"  # MPICH's mpicxx cannot stand in a path with a space
    place.symlink_to(pathlib.Path(sys.executable).parent.parent)
    env = ENV | {"PATH": f"{place / 'bin'}:{ENV['PATH']}"}

    def run(change=lambda text: text, commands=commands):
        (tmp_path / "mine.cpp").write_text(change(source))
        return subprocess.run(["bash", "-ec", commands], cwd=tmp_path, env=env, text=True,
                              capture_output=True, timeout=100)
    return run


def test_the_quick_start_ends_as_the_page_says(quick_start):
    job = quick_start()
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines()[-1] in PAGE


def test_the_planted_fault_is_explained_as_the_page_says(quick_start):
    job = quick_start(lambda text: text.replace("(int)x.size()", "(int)x.size() - 1"))
    assert job.returncode == 1 and "element 12" in job.stdout
    assert job.stdout.splitlines()[-1] in PAGE
    job = quick_start(commands="python -m refimpl.oracle explain case.json 'got.{rank}.txt'")
    assert job.returncode == 1 and "the tail was dropped" in job.stdout, job.stdout
    said = "the tail was dropped: elements 12-12 were never summed"
    assert said in job.stdout and said in " ".join(PAGE.split())


def test_the_schema_the_page_and_the_code_name_the_same_files():
    for path in re.findall(r"`((?:refimpl|tests)/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists(), path
