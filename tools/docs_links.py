"""MkDocs hook: links to files outside of docs/ become plain text, because the site does not contain these files.

On a code host the same links lead to the files.
"""

import re

OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)")


def on_page_markdown(markdown: str, **_) -> str:
    """The Markdown of a page without links to parent folders; MkDocs calls it for each page."""
    return OUTSIDE.sub(r"\1", markdown)
