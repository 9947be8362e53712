"""The kernels' sources are found in a checkout, in an editable install and in a wheel."""
import configparser
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import numpy
import pytest
from setuptools import find_packages

from refimpl import kernels
from tests.mpi import ROOT

SHOW = "from refimpl import kernels; print(kernels.folder()); print(len(kernels.source('lars.cu')))"
PARTS = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "refimpl", "kernels")


def say(*argv, cwd):
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    job = subprocess.run(argv, cwd=cwd, env=bare, capture_output=True, text=True, timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the project and an empty environment, which borrows numpy and setuptools."""
    place = tmp_path_factory.mktemp("install")
    (place / "project").mkdir()
    for part in PARTS:
        source, target = ROOT / part, place / "project" / part
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target)
    say(sys.executable, "-m", "venv", "--without-pip", str(place / "venv"), cwd=place)
    [site] = (place / "venv" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(str(pathlib.Path(numpy.__file__).parents[1]) + "\n")
    return place


def installed(place, *what):
    """Install, and return what a Python outside the checkout finds."""
    python = str(place / "venv" / "bin" / "python")
    say(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps",
        "--no-build-isolation", "--no-index", "--force-reinstall", *what, cwd=place)
    folder, length = say(python, "-c", SHOW, cwd=place / "venv").split()
    assert int(length) == len(kernels.source("lars.cu"))
    return pathlib.Path(folder)


def test_in_a_checkout():
    assert kernels.folder() == ROOT / "kernels"


def test_setup_cfg_names_every_package():
    """The list is written out, because `find:` cannot take in kernels/."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = config["options"]["packages"].split()
    assert sorted(named) == sorted([*find_packages(str(ROOT), include=["refimpl*"]),
                                    "refimpl.cuda"])


def test_in_an_editable_install(place):
    assert installed(place, "-e", "project") == place / "project" / "kernels"


def test_in_a_wheel(place):
    say(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
        "--no-index", "-w", "wheels", "./project", cwd=place)
    [wheel] = (place / "wheels").glob("*.whl")
    folder = installed(place, str(wheel))
    assert folder.parent.name == "refimpl" and place / "venv" in folder.parents
    assert {p.name for p in folder.iterdir()} == {p.name for p in kernels.folder().iterdir()}
    with zipfile.ZipFile(wheel) as held:  # recipes, clusters, photographs: all that is no code
        assert {p.relative_to(ROOT).as_posix() for p in (ROOT / "refimpl").rglob("*.*")
                if "__pycache__" not in p.parts} <= {*held.namelist()}
