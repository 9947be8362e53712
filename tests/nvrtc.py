"""NVRTC from PyPI through ctypes: compiles CUDA sources for a GPU that need not be there."""
import ctypes
import functools
import importlib.metadata


@functools.cache
def _library() -> ctypes.CDLL:
    files = importlib.metadata.files("nvidia-cuda-nvrtc")
    [path] = [f for f in files if f.name.startswith("libnvrtc.so") or f.name == "libnvrtc.dylib"]
    return ctypes.CDLL(str(path.locate()))


def compile_ptx(text: str, options: tuple[str, ...]) -> tuple[int, str, str]:
    """Returns (0 for success, the compiler's words, the PTX)."""
    lib, program = _library(), ctypes.c_void_p()
    assert lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"k.cu", 0, None, None) == 0
    try:
        words = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        code = lib.nvrtcCompileProgram(program, len(options), words)
        log = _text(program, lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog)
        ptx = "" if code else _text(program, lib.nvrtcGetPTXSize, lib.nvrtcGetPTX)
        return code, log, ptx
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program, size_of, get) -> str:
    size = ctypes.c_size_t()
    assert size_of(program, ctypes.byref(size)) == 0
    room = ctypes.create_string_buffer(size.value)
    assert get(program, room) == 0
    return room.value.decode()
