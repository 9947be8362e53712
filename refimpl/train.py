"""The training loop: read this file first.

    for each step                                              (Goyal et al. 2017, section 3)
        for each worker this rank plays: forward, loss / (kn), backward into the flat buffer
        sum the buffer over all ranks                          (Mikami et al. 2018: 2D torus)
        update the weights with the schedule's learning rate

    mpirun -np N python -m refimpl.train [--recipe NAME] [--setting value ...]
"""
import faulthandler
import os
import signal
import sys
import threading
import traceback

from refimpl import config, device, launch
from refimpl.collective.guard import Watchdog
from refimpl.errors import BadImage, CannotWrite, Diverged, LoaderFailed, UsageError
from refimpl.ranks import StopSignal, everywhere
from refimpl.schedule import Moment


def train(settings: config.Settings, comm, stop: StopSignal) -> int:
    """One whole run on the ranks of `comm`; returns the exit code."""
    from refimpl.run import Run
    with Watchdog(settings.timeout):  # a rank that waits too long says for whom, and ends the job
        run = Run(settings, comm, stop)
        for step in range(run.first_step, run.schedule.total_steps):
            moment = run.schedule.at(step)
            sums = train_step(run, moment)
            run.after_step(moment, sums)
            if sums["stop"]:  # any rank was asked to: all ranks see the same sum
                return run.stop()
        return run.finish()


def train_step(run, moment: Moment) -> dict[str, float]:
    """One minibatch of kn samples; returns its sums (gradients.TAIL: mean loss and top-1 first), which
    are the same on every rank."""
    gradients, scale = run.gradients, run.scale
    mine = run.workers(moment)
    gradients.clear(moment.workers, moment.kn, idle=not mine)
    for worker in mine:
        images, labels = run.next_batch()
        gradients.begin_worker(last=worker == mine[-1])
        with run.clock("forward"), run.autocast():
            logits = run.model(images)
            loss = run.loss(logits, labels) / moment.kn  # Goyal, remark 3: over kn, not n
        with run.clock("backward"):
            (loss * scale.value).backward()
        gradients.end_worker(loss, (logits.argmax(1) == labels).sum())
    for wish in run.wishes():  # to save or to stop: one rank's wish reaches all with the sum
        gradients.wish(wish)
    with run.clock("allreduce"):
        sums = run.reduce(scale.value)
    if scale.accept(sums, moment):  # the same decision on every rank, before any weight changes
        with run.clock("update"):
            run.optimizer.step(moment.lr, moment.momentum)
        gradients.apply_statistics()
    return sums


def main(argv: list[str] | None = None) -> int:
    """Parse, then train. Exit codes: 0 done, 1 failed, 2 bad input, 75 stopped on request."""
    stop, problem, patience = StopSignal(), None, 60.0
    stop.listen([signal.SIGUSR1])  # until MPI has started, SIGTERM and Ctrl-C just end the process
    for name in ("stdout", "stderr"):  # closed by the shell: >&-
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))
    sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold bytes that are no text
    try:
        settings, flags = config.parse(sys.argv[1:] if argv is None else argv)
        if flags.list_recipes or flags.dry_run:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
            if device.rank_hint(os.environ) in (0, None):
                print(launch.describe(settings, flags))
            return 0
        patience = settings.timeout
    except UsageError as error:
        problem = error
    try:
        MPI = wait_for_all_ranks_to_start_mpi(patience)
    except (ImportError, RuntimeError) as error:  # no mpi4py, no MPI
        print(f"refimpl.train: {problem or error}", file=sys.stderr)
        return 2
    stop.listen()
    comm = MPI.COMM_WORLD
    try:
        device.refuse_split_world(comm)
        everywhere(comm, lambda: refuse(problem))
        return train(settings, comm, stop)
    except (UsageError, Diverged) as error:
        return leave(comm, error)
    except BaseException as error:  # this rank alone: without an abort the others would wait for ever
        plain = isinstance(error, (BadImage, CannotWrite, LoaderFailed))
        told = str(error) if plain else traceback.format_exc()
        if isinstance(error, MemoryError) or "memory" in str(error) and not plain:
            told += "out of memory: start fewer ranks per node, or lower --n or --loaders"
        print(f"refimpl.train: rank {comm.rank} of {comm.size} failed:\n{told}", file=sys.stderr,
              flush=True)
        comm.Abort(1)
        os._exit(1)  # MPICH's Abort returns, and the launcher kills a moment later


def wait_for_all_ranks_to_start_mpi(patience: float):
    """mpi4py's MPI. Where some rank does not come, the job ends, and a stack names this function:
    MPI holds the interpreter meanwhile, so nothing else could speak."""
    faulthandler.dump_traceback_later(max(10, patience), exit=True, file=sys.__stderr__)
    try:
        from mpi4py import MPI
        return MPI
    finally:
        faulthandler.cancel_dump_traceback_later()


def refuse(problem: UsageError | None) -> None:
    if problem:
        raise problem


def leave(comm, error: Exception) -> int:
    """An error that all ranks raise alike is told once. Where one rank came here alone after all,
    it tells, and ends the job instead of waiting for ever."""
    def alone():
        print(f"refimpl.train: rank {comm.rank} alone: {error}", file=sys.stderr, flush=True)
        comm.Abort(2)
    patience = threading.Timer(20, alone)
    patience.daemon = True
    patience.start()
    if comm.rank == 0:
        print(f"refimpl.train: {error}", file=sys.stderr, flush=True)
    comm.Barrier()  # the message is out before a launcher sees an exit code
    patience.cancel()
    patience.join()  # a thread that still runs when the interpreter ends may crash it
    return 2 if isinstance(error, UsageError) else 1


if __name__ == "__main__":
    sys.exit(main())
