"""The hooks of mkdocs.yml: pages from outside of docs/, and docstrings on the page of the Python names."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parent.parent

SOURCES: Final = {
    "readme.md": "README.md",
    "license.md": "LICENSE",
    "measured/results.md": "scripts/bench/RESULTS.md",
    "measured/gpu-check-h100-80gb.md": "scripts/bench/gpu-check-h100-80gb.md",
    "measured/gpu-check-h200-141gb.md": "scripts/bench/gpu-check-h200-141gb.md",
}
"""Pages of the site that stand outside of docs/, with their place in the repository."""

_PLACES: Final = {source: page for page, source in SOURCES.items()} | {"docs": "index.md"}
# Of Markdown and of pictures in HTML.
_LINK: Final = re.compile(r'(?:(?<=\]\()|(?<=src=")|(?<=srcset="))(?!\w+:|#)([^)"#\s]+)')
_DOCSTRING: Final = re.compile(r"<!-- docstring: ([\w.]+) -->")  # GitHub shows nothing of it


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Puts the version of the checkout behind the name of the site."""
    text = (ROOT / "src" / "can_train" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.*)"$', text, flags=re.MULTILINE)
    config.site_name = f"{config.site_name} {version[1]}" if version else config.site_name
    return config


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Adds the pages from outside of docs/."""
    from mkdocs.structure.files import File

    for page, source in SOURCES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Turns links in the repository into links in the site, and marked places into docstrings."""
    here = page.file.src_uri
    linked = _LINK.sub(lambda match: site_link(here, match[1]), markdown)
    return _DOCSTRING.sub(r"::: can_train.\1", linked)


def site_link(page: str, link: str) -> str:
    """Returns a link from a page of the site to the page of the site that has the linked file."""
    source = PurePosixPath(SOURCES.get(page, f"docs/{page}"))
    target = normpath((source.parent / link).as_posix())
    place = _PLACES.get(target, target.removeprefix("docs/"))
    return relpath(place, PurePosixPath(page).parent.as_posix())
