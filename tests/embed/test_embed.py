"""Test projects that build against the core, for every way to find it.

    python -m pytest -m slow tests/embed

Compiling takes a minute. PYCOLLECT_WHEEL is the path of a wheel of this checkout; if it is not
set, a wheel is built first.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pycollect

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("embed")]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PYBIND11 = pytest.importorskip("pybind11").get_cmake_dir()
# Uses the tools of this interpreter's environment. No optimization, to save time.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "CMAKE_ARGS": f"-DCMAKE_CXX_FLAGS_RELEASE=-O0 -Dpybind11_DIR={PYBIND11}",
}
JOBS = str(os.cpu_count() or 1)  # without a number, make starts all jobs at once
GCC, CLANG = shutil.which("g++"), shutil.which("clang++")
UNOPTIMIZED = "pycollect is built without optimization"
RESULT = f"{pycollect.__version__}, 6 frames, dtype: expected"

SUBDIRECTORY = ["-DWAY=add_subdirectory", f"-DPYCOLLECT_CHECKOUT={ROOT}"]

needs_clang = pytest.mark.skipif(CLANG is None, reason="clang++ is not installed")


def run(*command: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command with its errors in `stdout`; fail if `check` and the command fails."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        cwd="/",  # not the checkout, whose package Python would import
        env=ENVIRONMENT,
    )
    assert not check or done.returncode == 0, done.stdout
    return done


def configure(folder: Path, *options: str, compiler: str | None = GCC) -> str:
    """Configure the consumer and return the output of CMake."""
    chosen = f"-DCMAKE_CXX_COMPILER={compiler}"
    return run("cmake", "-S", HERE / "consumer", "-B", folder, chosen, *options).stdout


def build(folder: Path, *targets: str) -> subprocess.CompletedProcess[str]:
    """Build the consumer; the build may fail."""
    wanted = [word for target in targets for word in ("--target", target)]
    return run("cmake", "--build", folder, "--parallel", JOBS, *wanted, check=False)


def built(folder: Path) -> None:
    """Build the consumer, check its program's output and its library's symbols."""
    done = build(folder)
    assert done.returncode == 0, done.stdout
    assert run(folder / "program").stdout.startswith(RESULT)
    assert_hidden(folder / "libshared.so", "consumers_own")
    assert_single_process(folder / "program")


def assert_single_process(program: Path) -> None:
    """Check that a program over the core has no shared memory and no handlers of forks."""
    names = run("nm", program).stdout
    assert not re.findall(r"memfd_create|atfork|mailbox", names, re.I)


def assert_hidden(library: Path, own: str) -> None:
    """Check that the library exports its own symbol and none of pycollect."""
    names = run("nm", "-D", "--defined-only", library).stdout
    assert own in names
    assert "9pycollect" not in names


def visible_options(folder: Path) -> set[str]:
    """Return the names of pycollect's options in the consumer's cache."""
    return set(
        re.findall(r"^(pycollect\w*):", run("cmake", "-LA", "-N", folder).stdout, re.M | re.I)
    )


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "PYCOLLECT_WHEEL" in os.environ:
        return Path(os.environ["PYCOLLECT_WHEEL"])
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, ROOT)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment with only the wheel."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "install", "--no-deps", wheel)
    return folder / "bin/python"


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of an archive built by gcc; `prefix.parent` contains its build folder."""
    folder = tmp_path_factory.mktemp("installed")
    options = [f"-DCMAKE_CXX_COMPILER={GCC}", "-DCMAKE_BUILD_TYPE=Release"]
    options += ["-DCMAKE_CXX_FLAGS_RELEASE=-O1", f"-DCMAKE_INSTALL_PREFIX={folder / 'prefix'}"]
    options += ["-DCMAKE_UNITY_BUILD=ON"]
    run("cmake", "-S", ROOT, "-B", folder / "build", *options)
    run("cmake", "--build", folder / "build", "--parallel", JOBS)
    run("cmake", "--install", folder / "build")
    return folder / "prefix"


def test_the_consumer_decides_about_unity_builds(tmp_path: Path) -> None:
    own = "core.dir/csrc/src/slab.cpp"
    for choice, one_by_one in ([], False), (["-DCMAKE_UNITY_BUILD=OFF"], True):
        configure(tmp_path, *SUBDIRECTORY, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *choice)
        assert (own in (tmp_path / "compile_commands.json").read_text()) == one_by_one


def test_add_subdirectory_without_a_build_type_or_the_kernel_for_devices(tmp_path: Path) -> None:
    options = [*SUBDIRECTORY, "-DPYCOLLECT_GATHER=OFF"]
    assert UNOPTIMIZED in configure(tmp_path, *options, compiler=CLANG or GCC)
    assert UNOPTIMIZED not in run("cmake", tmp_path).stdout  # one warning per build folder
    assert not visible_options(tmp_path)
    built(tmp_path)


@pytest.mark.parametrize(
    ("compiler", "build_type"), [(GCC, ""), pytest.param(CLANG, "Release", marks=needs_clang)]
)
def test_an_installed_prefix(prefix: Path, tmp_path: Path, compiler: str, build_type: str) -> None:
    options = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_BUILD_TYPE={build_type}"]
    assert UNOPTIMIZED not in configure(
        tmp_path, *options, compiler=compiler
    )  # the archive was built before
    built(tmp_path)


def test_a_build_folder(prefix: Path, tmp_path: Path) -> None:
    configure(tmp_path, f"-Dpycollect_DIR={prefix.parent / 'build'}")
    built(tmp_path)


def test_pkg_config(prefix: Path, tmp_path: Path) -> None:
    text = (prefix / "lib/pkgconfig/pycollect.pc").read_text()
    fields = dict(re.findall(r"^(\w+)[:=] *(.*)$", text, re.M))
    assert fields["Version"] == pycollect.__version__

    def words(name: str) -> list[str]:
        return re.sub(r"\$\{(\w+)\}", lambda m: fields[m[1]], fields[name]).split()

    program = tmp_path / "program"
    run(
        GCC,
        "-std=c++20",
        *words("Cflags"),
        HERE / "consumer/main.cpp",
        *words("Libs"),
        "-o",
        program,
    )
    assert run(program).stdout.startswith(RESULT)


def test_another_version_is_not_found(prefix: Path, tmp_path: Path) -> None:
    major, minor, _ = pycollect.__version__.split(".")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(consumer CXX)\n"
        f"find_package(pycollect {major}.{int(minor) + 1} REQUIRED)\n"
    )
    done = run(
        "cmake", "-S", tmp_path, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}", check=False
    )
    assert done.returncode != 0
    assert "compatible with requested version" in done.stdout


def test_another_form_of_string_does_not_link_an_archive(prefix: Path, tmp_path: Path) -> None:
    flag = "-DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0"
    configure(tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}", flag)
    assert_does_not_link(build(tmp_path, "program"), "_cxx98")


def test_another_major_version_does_not_link_an_archive(prefix: Path, tmp_path: Path) -> None:
    headers = tmp_path / "include"
    shutil.copytree(prefix / "include", headers)
    version = headers / "pycollect/version.h"
    text, changed = re.subn(r"(VERSION_MAJOR) \d+", r"\1 7", version.read_text())
    assert changed == 1
    version.write_text(text)
    link = [f"-L{prefix}/lib", "-lpycollect", "-pthread", "-ldl", "-o", tmp_path / "program"]
    done = run(GCC, "-std=c++20", f"-I{headers}", HERE / "consumer/main.cpp", *link, check=False)
    assert_does_not_link(done, "v7_")


def assert_does_not_link(done: subprocess.CompletedProcess[str], name: str) -> None:
    """Check that the program compiled, but lacks symbols of this ABI when linked."""
    assert done.returncode != 0
    missing = re.findall(r"undefined reference to `pycollect::(\w+)::", done.stdout)
    assert missing, done.stdout
    assert all(name in space for space in missing)


def test_an_older_standard_is_refused_by_name(prefix: Path) -> None:
    options = ["-std=c++17", "-fsyntax-only", f"-I{prefix}/include"]
    done = run(GCC, *options, HERE / "consumer/main.cpp", check=False)
    assert "pycollect needs C++20" in done.stdout


def test_the_command_prints_the_packages_folder_without_imports(python: Path) -> None:
    code = "import sys\nfrom pycollect.__main__ import main\n"
    code += "main(['--cmake-dir'])\nmain(['--include-dir'])\n"
    code += "print([m for m in ('torch', 'numpy', 'pycollect._core') if m in sys.modules])"
    cmake, include, imported = run(python, "-c", code).stdout.splitlines()
    assert run(python, "-m", "pycollect", "--cmake-dir").stdout.strip() == cmake
    assert (Path(cmake) / "pycollectConfig.cmake").is_file()
    assert (Path(include) / "pycollect/pycollect.h").is_file()
    assert imported == "[]"


def test_an_installed_wheel_with_another_form_of_string(python: Path, tmp_path: Path) -> None:
    """Also build the example of Python environments, which shares no C++ types with pycollect."""
    found = run(python, "-m", "pycollect", "--cmake-dir").stdout.strip()
    options = [f"-Dpycollect_DIR={found}", "-DCMAKE_BUILD_TYPE=Release"]
    assert UNOPTIMIZED not in configure(tmp_path / "optimized", *options)
    flag = "-DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0"
    example = ROOT / "examples/cpp/python_env"
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={PYBIND11}"]
    output = configure(
        tmp_path, f"-Dpycollect_DIR={found}", flag, f"-DOTHER_PROJECT={example}", *options
    )
    assert UNOPTIMIZED in output
    assert visible_options(tmp_path) <= {"pycollect_DIR"}
    built(tmp_path)
    modules = f"PYTHONPATH={tmp_path / 'other'}"
    output = run("env", modules, sys.executable, example / "collect.py").stdout
    assert re.search(r"^SyncDataCollector: \(64, 256\), mean return [45]\d\d", output)
    assert "MultiSyncDataCollector: " in output


@pytest.fixture(scope="session")
def extension(python: Path) -> Path:
    """Interpreter with an extension that scikit-build-core built against the wheel."""
    packages = next(python.parent.parent.glob("lib/python*/site-packages"))
    # Build tools, numpy and torch come from the environment of this interpreter.
    (packages / "more.pth").write_text(
        "\n".join(p for p in sys.path if Path(p).name == packages.name)
    )
    run(python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", HERE / "extension")
    return python


def test_an_extension_and_our_own_module_in_one_process(extension: Path) -> None:
    """scikit-build-core finds the core in the wheel; both modules work in one process."""
    code = """
import pycollect_extension
from pycollect import _core
assert pycollect_extension.frames() == 6
try:
    _core.Leaf(("a",), "float33", ())
except ValueError as error:
    assert str(error) == pycollect_extension.error(), error
print(_core.__file__, pycollect_extension.__file__)
"""
    ours, theirs = run(extension, "-c", code).stdout.split()
    assert Path(ours).is_relative_to(extension.parent.parent)
    assert_hidden(Path(theirs), "PyInit_pycollect_extension")


@needs_clang
def test_an_extension_by_clang_without_a_build_type(extension: Path, tmp_path: Path) -> None:
    chosen = f"CMAKE_ARGS=-DCMAKE_CXX_COMPILER={CLANG} -Dpybind11_DIR={PYBIND11}"
    options = ["--no-deps", "--no-build-isolation", "--config-settings=cmake.build-type="]
    options += ["--config-settings=build.verbose=true", "--verbose"]
    target = ["--target", tmp_path, HERE / "extension"]
    output = run("env", chosen, extension, "-m", "pip", "install", *options, *target).stdout
    assert UNOPTIMIZED in output
    assert "clang" in output
    code = "import pycollect_extension as e; print(e.frames(), e.__file__)"
    frames, module = run("env", f"PYTHONPATH={tmp_path}", extension, "-c", code).stdout.split()
    assert frames == "6"
    assert Path(module).is_relative_to(tmp_path)
    assert_hidden(Path(module), "PyInit_pycollect_extension")


def test_environments_in_c_plus_plus_for_pythons_collectors(
    extension: Path, tmp_path: Path
) -> None:
    """Frames, ids, flags and seeds equal the log of the environments."""
    output = run(extension, HERE / "check_logged_env.py", tmp_path).stdout.splitlines()
    assert output == [
        "SyncDataCollector: 96 frames",
        "MultiSyncDataCollector: 192 frames",
        "an action of more than a million",
        *["seeds"] * 3,
    ]
    module = run(extension, "-c", "import logged_env; print(logged_env.__file__)").stdout.strip()
    assert_hidden(Path(module), "PyInit_logged_env")


def test_the_programs_of_the_tutorial(prefix: Path, tmp_path: Path) -> None:
    """The programs in docs/cpp.md compile unchanged and run."""
    text = (ROOT / "docs/cpp.md").read_text()
    programs = re.findall(r"```cpp\n(.*?)```", text, re.S)
    assert len(programs) > 1
    for i, program in enumerate(programs):
        source = tmp_path / f"{i}.cpp"
        source.write_text(program)
        (tmp_path / "CMakeLists.txt").open("a").write(
            f"add_executable(program{i} {source.name})\n"
            f"target_link_libraries(program{i} PRIVATE pycollect::core)\n"
        )
    lines = (tmp_path / "CMakeLists.txt").read_text()
    head = re.search(r"```cmake\n(.*?find_package.*?)\n", text, re.S)
    assert head is not None
    (tmp_path / "CMakeLists.txt").write_text(f"{head[1]}\n{lines}")
    run("cmake", "-S", tmp_path, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path, "--parallel", JOBS)
    assert "819200 frames" in run(tmp_path / "program0").stdout
    for i in range(1, len(programs)):
        run(tmp_path / f"program{i}")


def test_the_examples(prefix: Path, tmp_path: Path) -> None:
    """Each example trains to a mean return of 475."""
    torch = importlib.util.find_spec("torch")
    package = Path(str(torch.origin)).parent if torch is not None else ""
    options = [f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release"]
    run(
        "cmake", "-S", ROOT / "examples/cpp", "-B", tmp_path, *options, f"-DTORCH_PACKAGE={package}"
    )
    run("cmake", "--build", tmp_path, "--parallel", JOBS)
    assert "solved" in run(tmp_path / "train_cartpole").stdout
    if package:
        assert "solved" in run(tmp_path / "train_libtorch").stdout
