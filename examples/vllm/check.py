"""Send one long prompt twice to a server, and print how many of its tokens were cached: check.py URL FILE

If the server has an API key, set OPENAI_API_KEY to it.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"} if "OPENAI_API_KEY" in os.environ else {}
    request = urllib.request.Request(sys.argv[1] + path, data, {"Content-Type": "application/json", **key})
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        stop(f"{sys.argv[1]} answers with status {error.code}: {error.reason}")
    except OSError as error:
        stop(f"no server answers at {sys.argv[1]}: {getattr(error, 'reason', error)}")


def stop(message):
    print(message, file=sys.stderr)
    sys.exit(2)


if len(sys.argv) != 3 or not sys.argv[1].startswith(("http://", "https://")) or not Path(sys.argv[2]).is_file():
    stop("usage: check.py URL FILE, like check.py http://127.0.0.1:8000 LICENSE")
model, prompt = ask("/v1/models")["data"][0]["id"], Path(sys.argv[2]).read_text()[:6000]
for _ in range(2):
    usage = ask("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 8})["usage"]
    details = usage["prompt_tokens_details"] or {}
    print(usage["prompt_tokens"], "prompt tokens, cached:", details.get("cached_tokens"))
