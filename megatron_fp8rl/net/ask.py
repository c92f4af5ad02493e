"""JSON requests to the servers of judges and teachers. Imports only the standard library."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from megatron_fp8rl.net import auth

_RETRIED = (408, 409, 429, 500, 502, 503, 504)


def ask(url: str, body: Any, *, key: str, deadline_s: float, waits_s: Sequence[float]) -> Any:
    """The answer to a request, a GET if ``body`` is None. Waits before each attempt; repeats requests that may succeed.
    Raises ValueError with the URL and the reason, never with the ``key``."""
    headers = {"Content-Type": "application/json", **auth.headers(key)}
    data, failure = None if body is None else json.dumps(body).encode(), ""
    for wait_s in waits_s:
        time.sleep(wait_s)
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=deadline_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            failure = f"HTTP {error.code}: {error.read(200).decode(errors='replace')}"
            if error.code not in _RETRIED:
                break
        except (OSError, http.client.HTTPException) as error:
            failure = f"{type(error).__name__}: {error}"
        except ValueError as error:
            failure = f"the answer is not JSON: {error}"
            break
    raise ValueError(f"{url}: {failure}")
