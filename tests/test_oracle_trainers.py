"""The worked example of docs/oracle.md, run as it stands there: real trainers, right and wrong."""
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from refimpl.oracle.__main__ import main
from tests.mpi import ROOT

PAGE = (ROOT / "docs" / "oracle.md").read_text()
COMMANDS = re.search(r"A worked example.*?```sh\n(.*?)```", PAGE, re.S)[1]
ROWS = re.findall(r"^\| [^|]+ \| `((?:diff|state) [^`|]+)` \| (\d) \| ([^|]+) \|$", PAGE, re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the page's commands leave behind."""
    where = tmp_path_factory.mktemp("trainers")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
           "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    job = subprocess.run(["bash", "-ec", COMMANDS], cwd=where, env=env, capture_output=True,
                         text=True, timeout=200)
    assert job.returncode == 0, job.stdout[-2000:] + job.stderr[-4000:]
    return where


@pytest.mark.parametrize("command,code,words", ROWS, ids=[row[0] for row in ROWS])
def test_each_trainer_is_judged_as_the_page_says(command, code, words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(command.split()) == int(code)
    said = capsys.readouterr()
    for word in words.strip().split(" ... "):
        assert word in said.out + said.err


def test_a_demo_that_resumes_does_not_find_the_runs_of_the_page(folder):
    assert {run.name.split("-")[0] for run in (folder / "runs").iterdir()} == {"ddp"}


def test_the_page_judges_right_ones_wrong_ones_and_one_that_cannot_be_told():
    assert len(ROWS) >= 12 and {code for _, code, _ in ROWS} == {"0", "1", "2"}


def test_what_the_refusal_of_another_n_spares_its_reader(folder, tmp_path, capsys):
    """Without `n` in the traces a right trainer looks as if its forward pass were wrong."""
    files = []
    for name in ("n2.jsonl", "right.0.jsonl"):
        records = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        files.append(tmp_path / name)
        files[-1].write_text("".join(json.dumps({k: v for k, v in record.items() if k != "n"}) + "\n"
                                     for record in records))
    assert main(["diff", *map(str, files)]) == 1
    assert "step 0: loss parts first" in capsys.readouterr().out
