"""Hook of mkdocs: the pages of the repository's root join the site, README.md as its first page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        # links go from docs/ now, whose own pages are beside the page
        files.append(File.generated(config, page, content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A link to a file that is no page (an example, the Containerfile) stays as its name."""

    def kept(match: re.Match[str]) -> str:
        target = match[2].partition("#")[0]
        return match[0] if not target or "://" in target or files.get_file_from_path(target) else match[1]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)]+)\)", kept, markdown)
