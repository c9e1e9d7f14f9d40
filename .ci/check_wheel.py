"""Check that a wheel has the package, its stubs and module, the core's sources, and nothing else.

check_wheel.py WHEEL
"""

import re
import sys
import zipfile
from pathlib import Path

root = Path(__file__).parent.parent
package = root / "pycollect"
expected = {f"pycollect/{path.relative_to(package)}" for path in package.rglob("*.py")}
expected |= {"pycollect/py.typed", "pycollect/__init__.pyi", "pycollect/_core.pyi"}
expected |= {
    f"pycollect/share/cmake/pycollect/pycollectConfig{name}.cmake" for name in ("", "Version")
}
core = [
    file
    for folder in ("include", "src", "ipc", "gather")
    for file in root.glob(f"csrc/{folder}/**/*.*")
    if file.suffix != ".cu"
]
core += [root / "CMakeLists.txt", root / "cmake/pycollect-hidden.map"]
core += [root / f"cmake/{name}.cmake" for name in ("options", "unoptimized", "version")]
expected |= {f"pycollect/share/pycollect/{path.relative_to(root)}" for path in core}

listed = zipfile.ZipFile(sys.argv[1]).namelist()
names = {name for name in listed if not name.endswith("/")}  # auditwheel also lists folders
names = {name for name in names if not re.match(r"pycollect_rl-[^/]*\.dist-info/", name)}
modules = {name for name in names if re.fullmatch(r"pycollect/_core\.[^/]*\.so", name)}
if len(modules) != 1 or names - modules != expected:
    sys.exit(f"missing: {expected - names}, unexpected: {names - modules - expected}, {modules}")
print(f"{len(names)} files, {modules.pop()} among them")
