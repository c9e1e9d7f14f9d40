"""A wheel has the package, its types and its module, and nothing else: check_wheel.py WHEEL."""

import re
import sys
import zipfile
from pathlib import Path

package = Path(__file__).parent.parent / "pycollect"
expected = {f"pycollect/{path.relative_to(package)}" for path in package.rglob("*.py")}
expected |= {"pycollect/py.typed", "pycollect/__init__.pyi", "pycollect/_core.pyi"}

names = set(zipfile.ZipFile(sys.argv[1]).namelist())
names = {name for name in names if not re.match(r"pycollect-[^/]*\.dist-info/", name)}
modules = {name for name in names if re.fullmatch(r"pycollect/_core\.[^/]*\.so", name)}
if len(modules) != 1 or names - modules != expected:
    sys.exit(f"missing: {expected - names}, unexpected: {names - modules - expected}, {modules}")
print(f"{len(names)} files, {modules.pop()} among them")
