"""Links of pages to files of the checkout that are no pages: figures, examples, configurations.

MkDocs knows files under docs/ alone. What a page links to elsewhere is copied into the site, at its path in the checkout;
links to folders and to Markdown there become plain words, or lead to the repository where mkdocs.yml names one.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def outside(link: str, page: str) -> str | None:
    """The path in the checkout of what `link` on `page` (a path in docs/) leads to; None if that is a page or elsewhere."""
    path = link.partition("#")[0]
    target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
    if not path or ":" in path or target.startswith("docs/") or not (ROOT / target).exists():
        return None
    return target


def copied(target: str) -> bool:
    return (ROOT / target).is_file() and not target.endswith(".md")


def on_files(files, config):
    for file in list(files.documentation_pages()):
        for _, _, link in LINK.findall(file.content_string):
            target = outside(link, file.src_uri)
            if target and copied(target) and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri

    def led(link: re.Match) -> str:
        picture, words, path = link.groups()
        target = outside(path, here)
        if target is None:
            return link[0]
        if copied(target):
            return f"{picture}[{words}]({posixpath.relpath(target, posixpath.dirname(here))})"
        return f"[{words}]({config.repo_url.rstrip('/')}/blob/main/{target})" if config.repo_url else words

    return LINK.sub(led, markdown)
