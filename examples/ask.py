"""Ask a server that speaks OpenAI's interface to go on with a text; wait for it to come up first.

python examples/ask.py http://127.0.0.1:8000 "Once upon a time" [tokens]
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request

WAIT_S = 120


def ask(url: str, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
    """Return the answer to a request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        found: dict[str, object] = json.load(answer)
    return found


def wait(url: str) -> None:
    """Wait until the server takes requests."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=10).close()
            return
        except OSError as error:  # not there yet, or not ready
            if time.monotonic() > end:
                sys.exit(f"{url} is not ready after {WAIT_S} s: {error}")
            time.sleep(0.3)


def main(url: str, prompt: str, tokens: int = 60) -> None:
    """Print the prompt and how the model goes on."""
    wait(url)
    began = time.monotonic()
    answer = ask(url, "/v1/completions", {"prompt": prompt, "max_tokens": tokens, "temperature": 0})
    [choice] = answer["choices"]  # type: ignore[misc]
    print(f"{prompt}│{choice['text']}")
    print(f"{tokens} tokens in {time.monotonic() - began:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
