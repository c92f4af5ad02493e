"""The hint of an error about an unknown name. Imports only the standard library, for login nodes."""

import difflib
from collections.abc import Iterable


def near_matches(name: str, candidates: Iterable[str]) -> str:
    """'; did you mean ...?' with the closest candidates, or an empty string."""
    matches = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
