"""A hook of MkDocs: what links from docs/ to other folders become on the site.

Pages are written for the repository, where a link such as `../examples/train.py` works. On the site a plot of
`bench/results` is copied beside the pages, and everything else is a link to the repository.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

PLOTS = re.compile(r"bench/results/([\w.-]+\.png)")
_TARGET = re.compile(r"(?<=\]\()\.\./[^)\s]+|(?<=\]: )\.\./\S+")
_COPIES = "plots"


def rewritten(markdown: str, page: str, repository: str) -> str:
    """The text of a page, named as in docs/, with the links that leave docs/ in the form of the site."""

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), match[0]))
        if target.startswith("docs/"):
            return match[0]
        if plot := PLOTS.fullmatch(target):
            return posixpath.relpath(f"{_COPIES}/{plot[1]}", posixpath.dirname(page) or ".")
        return f"{repository}/blob/main/{target}"

    return _TARGET.sub(replace, markdown)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by MkDocs for the text of each page; copies the plots that it shows."""
    from pathlib import Path

    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    for name in sorted(set(PLOTS.findall(markdown))):
        if files.get_file_from_path(f"{_COPIES}/{name}") is None:
            path = root / "bench/results" / name
            files.append(File.generated(config, f"{_COPIES}/{name}", abs_src_path=str(path)))
    return rewritten(markdown, page.file.src_uri, config.repo_url)
