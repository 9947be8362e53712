"""kernels.launch and the check for GPU machines, run on a stand-in for CuPy over host memory."""
import contextlib
import types

import numpy as np
import pytest
import torch

from refimpl import device, kernels
from refimpl.collective import buffers
from refimpl.data.loader import normalise
from refimpl.optimizer import flat
from tests import gpu_check, kernel_host
from tests.test_kernels_nvrtc import KERNELS

LAUNCHES = []  # (kernel, blocks, threads)


class Array(np.ndarray):
    @property
    def __cuda_array_interface__(self):
        return {"data": (self.ctypes.data, False)}


class Event:
    def record(self):
        pass

    synchronize = record


class RawModule:
    """Compiles nothing: hands out the host build of the kernel, if it was given its source."""
    def __init__(self, *, code, options):
        self.code, self.options = code, options

    def get_function(self, name):
        assert self.code == kernels.source(name.split("_")[0] + ".cu")

        def call(grid, block, arguments):
            LAUNCHES.append((name, *grid, *block))
            threads = min(*block, 8)  # fewer than a device would take: it is slow
            kernel_host.run(name, *arguments, blocks=min(*grid, 2), threads=threads)
        return call


def fake_cupy():
    as_array = lambda x, *_: np.array(x).view(Array)
    cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(getDevice=lambda: 0,
                                      getDeviceProperties=lambda _: {"name": b"stand-in"}),
        Device=lambda _: types.SimpleNamespace(attributes={"MultiProcessorCount": 3}),
        Event=Event, get_elapsed_time=lambda a, b: 1.0)
    return types.SimpleNamespace(
        __version__="0", RawModule=RawModule, cuda=cuda, asarray=as_array, asnumpy=np.array,
        zeros=lambda n, dtype: np.zeros(n, dtype).view(Array), copyto=np.copyto)


@pytest.fixture
def cupy():
    LAUNCHES.clear()
    module = types.ModuleType("stand_in")
    module.__dict__.update(vars(fake_cupy()))
    return module


def test_launch_takes_enough_blocks_but_no_more_than_the_device_holds(cupy):
    for n, blocks in [(0, None), (1, 1), (1024, 1), (1025, 2), (24 * 1024 + 1, 24)]:
        x = np.zeros(n, np.float32)
        kernels.elementwise(cupy, "add_float32", n, x, np.ones(n, np.float32))
        assert np.all(x == 1)
        assert LAUNCHES == ([] if blocks is None else [("add_float32", blocks, 256)])
        LAUNCHES.clear()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(3, 8, 6), (2, 5, 3), (1, 1, 1), (0, 4, 4)])
def test_the_trainers_images_are_normalised_by_one_kernel_with_the_bits_of_the_cpu(
        cupy, monkeypatch, layout, shape):
    """Host memory plays the device's; the kernel is the host build."""
    for name, value in dict(from_device=lambda t: flat(t).numpy(), module=lambda _: cupy,
                            on_stream=contextlib.nullcontext).items():
        monkeypatch.setattr(buffers, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(cuda_stream=0))
    images = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (*shape, 3), np.uint8))
    found = device._by_kernel(torch.device("cpu"), layout)(images)
    assert [name for name, *_ in LAUNCHES] == ["images_float32"] * bool(images.numel())
    assert torch.equal(found, normalise(images, layout))
    assert found.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_without_cupy_torch_normalises_on_the_device(layout):
    images = torch.zeros((2, 5, 4, 3), dtype=torch.uint8)
    found = device.normaliser(torch.device("meta"), layout)(images)
    assert found.device.type == "meta" and found.is_contiguous(memory_format=layout)


def test_a_kernel_is_looked_up_once(cupy):
    assert kernels.kernel(cupy, "add_int32") is kernels.kernel(cupy, "add_int32")


def test_the_check_for_gpu_machines_passes_on_the_host_build(cupy, monkeypatch, capsys, tmp_path):
    for name, value in [("LENGTHS", (0, 7, 33)), ("SHIFTS", (0, 3)), ("REPEATS", 1), ("ROUNDS", 1)]:
        monkeypatch.setattr(gpu_check, name, value)
    assert gpu_check.main(["--elements", "50", "--json", str(tmp_path / "rows")], cupy) == 0
    out = capsys.readouterr().out
    assert "WRONG" not in out and out.splitlines()[-1].startswith("39 of 39 right")
    asked = {name for name, *_ in LAUNCHES}
    assert asked == {name for names in KERNELS.values() for name in names}  # none is left out


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_check_sees_a_wrong_kernel(cupy, monkeypatch):
    monkeypatch.setattr(gpu_check, "LENGTHS", (33,))
    monkeypatch.setattr(kernels, "kernel", lambda *_: lambda *_: None)  # nothing runs
    unseen = [name for name, make in gpu_check.cases() if not gpu_check.wrong(cupy, name, make)]
    assert unseen == []


def test_without_a_gpu_the_check_says_so(capsys):
    assert gpu_check.main(["--elements", "8"], types.SimpleNamespace()) == 2
    assert "no GPU" in capsys.readouterr().err
