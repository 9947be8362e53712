"""Start a recipe on a cluster: the printed sbatch script, what a dry run prints, a check of a launch.

    python -m refimpl.launch sbatch RECIPE --data PATH > job.sh     prints a script, runs nothing
    mpirun -np N python -m refimpl.launch --check                   reports, sums once, stops
"""
import argparse
import json
import math
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Mapping

from refimpl import config, dryrun
from refimpl.errors import UsageError
from refimpl.settings import Settings

SLURM = ("time", "partition", "account", "qos", "constraint")  # options passed on to sbatch


def describe(s: Settings, flags) -> str:
    """What --list-recipes and --dry-run [--json] print; data is read where no count is known."""
    if flags.list_recipes:
        return dryrun.recipe_list()
    images = s.images
    if s.data or not images:
        from refimpl.data.index import open_index
        images = len(open_index(s.source, "train"))
    if flags.json:
        return json.dumps({**dryrun.plan(s, images), "command": config.command(s)}, indent=1)
    return f"{dryrun.text(s, images)}\n\n{config.command(s)}"


def sbatch(recipe: str, data: str, extra: list[str], nodes: int = 0, per_node: int = 0,
           options: Mapping[str, str] | None = None) -> str:
    """A Slurm script for a recipe: by default the published number of GPUs, one rank on each."""
    s, flags = config.parse(["--recipe", recipe, "--data", data, *extra])
    if flags.dry_run or flags.list_recipes:
        raise UsageError("--dry-run and --list-recipes only print: give them to refimpl.train, here")
    published = config.load_recipe(recipe)
    gpus = published.machine.get("gpus", min(8, s.workers))
    per_node = per_node or min(gpus, published.machine.get("per_node", gpus))
    nodes = nodes or -(-gpus // per_node)
    if nodes < 1 or per_node < 1:
        raise UsageError(f"--nodes {nodes} --per-node {per_node}: at least 1 of each")
    if nodes * per_node > s.workers:
        raise UsageError(f"{nodes} nodes x {per_node} ranks for {s.workers} workers: ask for fewer "
                         "with --nodes and --per-node, or choose a recipe with more workers")
    recipe = os.path.abspath(recipe) if recipe.endswith(".toml") else recipe
    arguments = ["--recipe", recipe, *extra]
    grid = published.machine.get("grid", "auto")
    if s.grid == "auto" != grid and nodes * per_node == gpus and s.allreduce in ("auto", "torus"):
        arguments += ["--grid", grid]
    places = nodes * (1 if s.allreduce == "hierarchical" else per_node)
    if s.grid != "auto" and math.prod(config.GRID(s.grid)) != places:
        raise UsageError(f"--grid {s.grid} for {places} places ({nodes} nodes x {per_node} ranks; nodes "
                         "alone if hierarchical): leave it out, or make rows x columns as many")
    arguments += [] if s.resume else ["--resume", "auto"]  # starts anew where there is none yet
    job = re.sub(r"[^A-Za-z0-9_.-]", "_", s.name or published.name)
    fixed = {"job-name": job,
             "nodes": nodes, "ntasks-per-node": per_node, "gpus-per-node": per_node,
             "signal": f"USR1@{_lead((options or {}).get('time', 'UNLIMITED'))}",
             "output": "%x-%j.out", "open-mode": "append"}
    if s.device == "cpu":
        del fixed["gpus-per-node"]
    for key, value in (options or {}).items():
        if not re.fullmatch(r"[A-Za-z0-9_.:,@-]+", value):
            raise UsageError(f"--{key} {value!r}: letters, digits and _.:,@- only")
    lines = [f"#SBATCH --{key}={value}" for key, value in {**fixed, **(options or {})}.items()]
    return SCRIPT.format(
        sbatch="\n".join(lines), per_node=per_node,
        root=shlex.quote(str(pathlib.Path(__file__).resolve().parent.parent)),
        python=shlex.quote(sys.executable), data=shlex.quote(os.path.abspath(data)),
        arguments=shlex.join(arguments), job=job)


def _lead(time: str) -> int:
    """Seconds from USR1 to the end: 300, or a fifth of a shorter --time (as Slurm reads it)."""
    seconds = 86400 * (time.upper() in ("UNLIMITED", "INFINITE"))
    if re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time, re.ASCII):
        days, dash, clock = time.rpartition("-")
        units = (3600, 60, 1) if dash or clock.count(":") == 2 else (60, 1)
        seconds = 86400 * int(days or 0) + sum(int(n) * u for n, u in zip(clock.split(":"), units))
    if seconds < 120:  # Slurm may send it a minute early: a shorter job would only be requeued
        raise UsageError(f"--time {time!r}: minutes, h:mm:ss or d-hh:mm:ss, 2 minutes or more")
    return min(300, seconds // 5)


SCRIPT = r"""#!/bin/bash
{sbatch}
#SBATCH --exclusive
#SBATCH --requeue

set -euo pipefail
cd {root}
python=${{PYTHON:-{python}}}
data={data}

# one file, once per node: the shared file system is then left alone
if [[ $data == *.zip ]]; then
    local=${{SLURM_TMPDIR:-${{TMPDIR:-/tmp}}}}/$(basename "$data")
    srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 bash -c '
        [ "$(stat -c %s "$1")" = "$(stat -c %s "$2" 2>/dev/null)" ] ||
        {{ cp "$1" "$2.part" && mv "$2.part" "$2"; }}' copy "$data" "$local"
    data=$local
fi

export PYTHONUNBUFFERED=1
export SLURM_MPI_TYPE=${{SLURM_MPI_TYPE:-pmix}}  # how srun starts MPI; srun --mpi=list shows all
export OMPI_MCA_pml=${{OMPI_MCA_pml:-ucx}}       # Open MPI: a CUDA-aware path, or a clear stop
export UCX_MEMTYPE_CACHE=${{UCX_MEMTYPE_CACHE:-n}}  # torch's allocator is not seen by UCX's cache
export MPICH_GPU_SUPPORT_ENABLED=${{MPICH_GPU_SUPPORT_ENABLED:-1}}  # Cray MPICH

# every rank sees the GPUs of its node and takes one by its place there
run=(srun --kill-on-bad-exit=1 --gpu-bind=none
     --cpus-per-task=$((SLURM_CPUS_ON_NODE / {per_node})) "$python")
"${{run[@]}}" -m refimpl.launch --check

# USR1 before the end (--signal above), or a preemption's TERM: the run saves and leaves with 75
code=0
"${{run[@]}}" -m refimpl.train {arguments} --data "$data" \
    --name "{job}-$SLURM_JOB_ID" || code=$?  # a requeued job keeps its number, and so its run
if [ "$code" = 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def main(argv: list[str]) -> int:
    """`sbatch RECIPE --data PATH [--nodes N] [--per-node R] [options]`, or `--check`."""
    parser = argparse.ArgumentParser(prog="python -m refimpl.launch", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="under mpirun: report and stop")
    jobs = parser.add_subparsers(dest="job", metavar="sbatch RECIPE --data PATH")
    job = jobs.add_parser("sbatch", allow_abbrev=False,
                          help="print a Slurm script; further options go to refimpl.train")
    job.add_argument("recipe")
    job.add_argument("--data", required=True)
    job.add_argument("--nodes", type=int, default=0, help="default: as published")
    job.add_argument("--per-node", type=int, default=0, help="ranks (GPUs) per node")
    for key in SLURM:
        job.add_argument(f"--{key}", help="for Slurm" + (
            "; USR1 comes 5 minutes before the end, or a fifth of --time if less") * (key == "time"))
    known, extra = parser.parse_known_args(argv)
    try:
        if known.check:
            from refimpl.launchcheck import check
            return check()
        if known.job is None:
            parser.error("say `sbatch RECIPE --data PATH` or `--check`")
        options = {key: value for key in SLURM if (value := getattr(known, key))}
        print(sbatch(known.recipe, known.data, extra, known.nodes, known.per_node, options))
    except UsageError as error:
        print(f"refimpl.launch: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
