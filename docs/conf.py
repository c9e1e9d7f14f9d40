"""How these pages become a site: ``python -m sphinx -W -d build/doctrees docs docs/site``.

The reference is made from the package itself, which is imported for that: signatures of collectors
are put together when their modules are loaded, and only what runs knows them.
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
exclude_patterns = ["site"]  # the pages that are made
nitpicky = True  # a name in a docstring that leads nowhere is a warning, and so an error
nitpick_ignore_regex = [
    ("py:.*", r"(?!pycollect\b).*"),  # others' sites are not asked
    ("py:class", r"pycollect\._core\.\w+|pycollect\.collectors\.stats_writer\.HasStats"),
]

html_theme = "furo"
html_title = "pycollect"
html_copy_source = html_show_sourcelink = False
myst_heading_anchors = 3

default_role = "literal"  # `name` in docstrings
smartquotes = False  # "next" is a key
add_module_names = False
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False


def link_to_repository(app: Any, page: str, source: list[str]) -> None:
    """Files that are not part of the site are linked where the repository shows them."""
    pages, folder = Path(app.srcdir), (Path(app.srcdir) / page).parent

    def absolute(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / link[1]))
        if path.is_relative_to(pages):
            return link[0]
        return f"]({REPOSITORY}/{path.relative_to(pages.parent)}"

    source[0] = re.sub(r"\]\((\.\./[^)#\s]+)", absolute, source[0])


def public_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A class in an annotation is known by its module; the reference has it by its public name."""
    module, _, name = str(node.get("reftarget", "")).rpartition(".")
    while "." in module:
        module = module.rpartition(".")[0]
        if module.startswith("pycollect") and name in import_module(module).__dict__:
            target, domain = f"{module}.{name}", env.get_domain("py")
            place = env, node["refdoc"], app.builder, "class", target, node, content
            return domain.resolve_xref(*place)
    return None


def setup(app: Any) -> None:
    """Sphinx calls it."""
    app.connect("source-read", link_to_repository)
    app.connect("missing-reference", public_name)
