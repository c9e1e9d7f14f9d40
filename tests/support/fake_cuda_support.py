"""The C++ tests' fake CUDA driver for Python tests; it is built once and runs in new processes.

A process looks up the CUDA library only once, so each test with the fake driver starts a process.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from new_process import run_code

_ROOT = Path(__file__).parents[2]

PRELUDE = """
import ctypes, os
import numpy as np
from pycollect import _core

fake = ctypes.CDLL(os.environ["PYCOLLECT_CUDA_LIBRARY"])
fake.fake_cuda_log.restype = ctypes.c_char_p
fake.fake_cuda_advance.argtypes = [ctypes.c_uint64, ctypes.c_int]

def log():
    return fake.fake_cuda_log().decode().splitlines()

class OnDevice:
    '''A numpy array that says it lies on CUDA's device 0, as the fake's device memory does.'''

    def __init__(self, array):
        self.array = array

    def __dlpack__(self):
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # DLManagedTensor begins with the address, then the device's type: 2 is CUDA.
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 2
        return capsule
"""


@functools.cache
def fake_cuda_library(kernel: str = "") -> str:
    """Return the path of the fake driver; skip the test without a compiler.

    Args:
        kernel: C++ source that replaces the host version of the kernel, see `fake_cuda.cpp`.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tempfile.mkdtemp(prefix="pycollect-fake-cuda-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder) / "libfake_cuda.so"
    source = _ROOT / "tests" / "cpp" / "fake_cuda.cpp"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{_ROOT / 'csrc'}"]
    if kernel:
        path = Path(folder) / "kernel.h"
        path.write_text(kernel)
        command.append(f'-DFAKE_CUDA_KERNEL="{path}"')
    subprocess.run([*command, "-o", str(library), str(source)], check=True, timeout=300)
    return str(library)


def run(code: str, library: str, **environment: str) -> str:
    """Run code in a new process with this CUDA library, and return its output."""
    return run_code(code, PYCOLLECT_CUDA_LIBRARY=library, **environment)


def run_with_fake(code: str, kernel: str = "", **environment: str) -> str:
    """Run `PRELUDE` and the code in a new process with the fake driver; return its output."""
    return run(PRELUDE + code, fake_cuda_library(kernel), **environment)
