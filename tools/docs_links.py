"""MkDocs hook for links and roles that the site cannot show.

Links to files outside of docs/ become plain text, because the site does not contain these files. On a code host the
same links lead to the files. Sphinx roles such as :class: in docstrings are dropped; their names stay.
"""

import re

_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)")
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code>)")


def on_page_markdown(markdown: str, **_) -> str:
    """The Markdown of a page without links to parent folders; MkDocs calls it for each page."""
    return _OUTSIDE.sub(r"\1", markdown)


def on_page_content(html: str, **_) -> str:
    """The HTML of a page without roles; MkDocs calls it for each page."""
    return _ROLE.sub("", html)
