"""Bad input by the thousand, from fixed seeds: python -m tests.fuzz --parser images --inputs 15000

Each input is a valid one, changed at a few places, so that about half get past the first check.
Allowed is what the command lines turn into one line and an exit code; a fault is any other
exception, a death, more than SECONDS of CPU time, or more than LARGE bytes of memory.
A fault prints the number of its input: --first N --inputs 1 runs that one again.
"""
import argparse
import contextlib
import ctypes
import faulthandler
import io
import mmap
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback

SHM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
SECONDS, LARGE = 5, 1 << 30  # an image may have 89 million pixels: of 4 bytes, and copies of them
MOST = 20  # faults that are shown
NUMBERS = ("0", "-1", "1", "2", "7", "255", "256", "65535", "65536", "2147483647", "2147483648",
           "4294967295", "9223372036854775807", "18446744073709551616", "1e999", "-1e-999", "nan",
           "inf", "0.5", "1e300", "9" * 5000, "0x10", "1_0", "٣")
WORDS = ("", " ", "\0", "\n", "'", '"', "[", "]" * 9, "{" * 2000, "[" * 2000, "=", "#", "..", "/",
         "../../x", "/dev/null", "/", "%s%n", "{rank}", "\udcff", "\ud800", "true", "null", "a" * 9999,
         "$(id)", "-", "--", "ring", "torus:2x2", "train", "float16", "é")
BYTES = (b"\0", b"\xff", b"\x7f", b"\x80", b"\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\xff",
         b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"\xff" * 8)


class Hang(BaseException):
    """The input took more than SECONDS."""


def in_bytes(rng: random.Random, data: bytes, start: int = 0, stop: int | None = None) -> bytes:
    """One change between `start` and `stop`: a bit, some bytes, a piece out, twice, or cut off."""
    start = min(start, len(data) - 1) if data else 0
    stop = len(data) if stop is None else min(stop, len(data))
    at, size = rng.randrange(start, max(start + 1, stop)), rng.choice((1, 1, 2, 4, 8, 40))
    kind = rng.randrange(12)
    if kind < 5 and data:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1:]
    if kind < 9:
        new = rng.choice((*BYTES, rng.randbytes(size)))
        return data[:at] + new + data[at + len(new):]
    if kind == 11 and rng.random() < 0.7:
        return data[:at]
    return data[:at] + data[at:at + size] * rng.choice((0, 2, 2)) + data[at + size:]


def in_text(rng: random.Random, text: str, other: str) -> str:
    """One change of a token (a number, a word, a sign), or a line out, twice, or from `other`."""
    if rng.random() < 0.3:
        lines = text.splitlines(True)
        at = rng.randrange(len(lines) or 1)
        lines[at:at + 1] = rng.choice(([], lines[at:at + 1] * 2, [rng.choice(other.splitlines(True) or [""])]))
        return "".join(lines)
    tokens = list(re.finditer(r"[\d.]+|\w+|\S", text))
    if not tokens:
        return rng.choice(WORDS)
    token = rng.choice(tokens)
    if token[0][0].isdigit() and rng.random() < 0.8:
        new = rng.choice(NUMBERS)
    elif token[0].isalnum() and rng.random() < 0.7:
        new = rng.choice(re.findall(r"\w+", other) or WORDS)
    else:
        new = rng.choice((*WORDS, *NUMBERS))
    return text[:token.start()] + new + text[token.end():]


def in_tree(rng: random.Random, value, others):
    """One change somewhere in lists and dicts: another value there, or one more, or one less."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.15:
        if isinstance(value, str) and value and rng.random() < 0.5:
            return in_text(rng, value, value)
        return rng.choice(others)
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    new = dict(value) if isinstance(value, dict) else list(value)
    if (kind := rng.random()) < 0.12:
        del new[key]
    elif kind < 0.18 and isinstance(new, dict):
        new[rng.choice(("value", "x", "id", "__class__", ""))] = rng.choice(others)
    else:
        new[key] = in_tree(rng, value[key], others)
    return new


def some(rng: random.Random, change, value, *more, fewest: int = 1):
    """`value` with one change, often with two or three."""
    for _ in range(fewest + rng.choice((0, 0, 0, 1, 2))):
        value = change(rng, value, *more)
    return value


class Run:
    """One parser under test: what a fault is, and which input did it."""

    def __init__(self, name: str, seed: int, folder: str):
        from tests import fuzz_parsers
        self.name, self.seed = name, seed
        self.make, self.first_check, self.use, self.allowed = fuzz_parsers.PARSERS[name](folder)
        self.passed = self.asked = self.faults = 0
        self.slowest, self.most, self.memory = (0.0, -1), 0, Memory()

    def one(self, number: int) -> str:
        """Try one input: '' or what is wrong."""
        rng = random.Random(f"{self.name} {self.seed} {number}")
        case = self.make(rng)
        if number % 10 == 0:
            self.asked += 1
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                self.passed += bool(self.first_check(case))
        self.memory.start()
        begin, fault = time.process_time(), ""
        try:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, 12 * SECONDS)  # one that waits takes no CPU time
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                self.use(case)
        except self.allowed as error:
            fault = "MemoryError inside" if hides_memory_error(error) else ""
        except (Exception, SystemExit, Hang):
            fault = traceback.format_exc(limit=-6)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.slowest = max(self.slowest, (time.process_time() - begin, number))
        self.most = max(self.most, taken := self.memory.taken())
        return fault + (f"took {taken >> 20} MB" if taken > LARGE else "")


class Memory:
    """Resident bytes above those at the start of an input, at their peak."""

    def __init__(self):
        self.reset = os.open("/proc/self/clear_refs", os.O_WRONLY)

    def start(self) -> None:
        os.write(self.reset, b"5")  # the peak becomes what is there now
        self.before = self.peak()

    def taken(self) -> int:
        return self.peak() - self.before

    def peak(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def hides_memory_error(error) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def hang(*_):
    raise Hang


def fuzz(name: str, first: int, inputs: int, seed: int, at) -> int:
    """Run inputs first .. first + inputs - 1; `at` (shared memory) always says which one runs."""
    signal.signal(signal.SIGPROF, hang)
    signal.signal(signal.SIGALRM, hang)
    faulthandler.enable()
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        run = Run(name, seed, folder)
        start = time.monotonic()
        for number in range(first, first + inputs):
            at[:8] = number.to_bytes(8, "little")
            if fault := run.one(number):
                run.faults += 1
                print(f"{name} input {number}: {fault}", flush=True)
                if run.faults == MOST:
                    break
    print(f"{name}: {inputs} inputs, seed {seed}: {run.faults} faults; {run.passed / max(1, run.asked):.0%} past "
          f"the first check; slowest {run.slowest[0]:.2f} s (input {run.slowest[1]}), most memory "
          f"{run.most >> 20} MB; {time.monotonic() - start:.0f} s", flush=True)
    return min(1, run.faults)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: no fault. The inputs run in a child, so that a death is a fault with a number."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--parser", required=True,
                        choices=("recipes", "commands", "checkpoints", "oracle", "images"))
    for name, default in (("inputs", 15000), ("seed", 1), ("first", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    at = mmap.mmap(-1, 8)
    if not (child := os.fork()):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: ends with this process
        code = 1
        try:
            code = fuzz(args.parser, args.first, args.inputs, args.seed, at)
        except BaseException:  # of the fuzzer itself
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        print(f"{args.parser} input {int.from_bytes(at[:8], 'little')}: killed by signal "
              f"{os.WTERMSIG(status)}")
        return 1
    return os.WEXITSTATUS(status)


if __name__ == "__main__":
    sys.exit(main())
