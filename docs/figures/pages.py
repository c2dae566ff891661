"""Hook of mkdocs: pages of the root join the site, README.md as its first one, and a page a plug-in."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
PLUGIN = r"\]\((?:\.\./)?plugins/(\w+)/README\.md"
"""a link from docs/ or the root to a plug-in's page"""


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        # links go from docs/ now, whose own pages are beside the page
        text = re.sub(r"\]\(docs/", "](", text)
        files.append(File.generated(config, page, content=re.sub(PLUGIN, r"](plugins/\1.md", text)))
    for page in sorted((ROOT / "plugins").glob("*/README.md")):
        text = re.sub(r"\]\(\.\./\.\./docs/", "](../", page.read_text(encoding="utf-8"))
        files.append(File.generated(config, f"plugins/{page.parent.name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A link to a file that is no page (an example, the Containerfile) stays as its name."""

    def kept(match: re.Match[str]) -> str:
        target = match[2].partition("#")[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), target))
        return match[0] if not target or "://" in target or files.get_file_from_path(path) else match[1]

    markdown = re.sub(PLUGIN, r"](plugins/\1.md", markdown)
    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)]+)\)", kept, markdown)
