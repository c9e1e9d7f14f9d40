"""Configure the documentation site: ``python -m sphinx -W -d build/doctrees docs docs/site``.

The API reference imports the package, because the signatures of collectors are assembled when their
modules are imported.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pycollect

REPOSITORY = "https://github.com/pycollect-rl/pycollect/blob/main"

project = "pycollect"
author = "The pycollect authors"
version = release = pycollect.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["site"]  # the output
nitpicky = True  # an unresolved name in a docstring is a warning, and -W makes it an error
nitpick_ignore_regex = [
    ("py:.*", r"(?!pycollect\b).*"),  # names of other packages are not linked
    ("py:class", r"pycollect\._core\.\w+|pycollect\.api\.stats_writer\.HasStats"),
]

html_theme = "furo"
html_title = "pycollect"
html_copy_source = html_show_sourcelink = html_show_copyright = False
myst_heading_anchors = 3

default_role = "literal"  # `name` in docstrings
smartquotes = False  # "next" is a key
add_module_names = False
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"  # list at the right: `stats()`, not its class too
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False


def link_to_repository(app: Any, page: str, source: list[str]) -> None:
    """Point links to files outside docs/ at the repository."""
    pages, folder = Path(app.srcdir), (Path(app.srcdir) / page).parent

    def absolute(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / link[1]))
        if path.is_relative_to(pages):
            return link[0]
        return f"]({REPOSITORY}/{path.relative_to(pages.parent)}"

    source[0] = re.sub(r"\]\((\.\./[^)#\s]+)", absolute, source[0])


def public_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Resolve a class that an annotation names by its private module to its public name."""
    module, _, name = str(node.get("reftarget", "")).rpartition(".")
    while "." in module:
        module = module.rpartition(".")[0]
        if module.startswith("pycollect") and name in import_module(module).__dict__:
            target, domain = f"{module}.{name}", env.get_domain("py")
            place = env, node["refdoc"], app.builder, "class", target, node, content
            return domain.resolve_xref(*place)
    return None


def setup(app: Any) -> None:
    """Connect both handlers; Sphinx calls this."""
    app.connect("source-read", link_to_repository)
    app.connect("missing-reference", public_name)
