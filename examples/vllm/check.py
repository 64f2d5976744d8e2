"""Send one long prompt twice to a server, and print how many of its tokens were cached: check.py URL FILE

If the server has an API key, set OPENAI_API_KEY to it.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"} if "OPENAI_API_KEY" in os.environ else {}
    request = urllib.request.Request(sys.argv[1] + path, data, {"Content-Type": "application/json", **key})
    return json.load(urllib.request.urlopen(request))


model, prompt = ask("/v1/models")["data"][0]["id"], Path(sys.argv[2]).read_text()[:6000]
for _ in range(2):
    usage = ask("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 8})["usage"]
    details = usage["prompt_tokens_details"] or {}
    print(usage["prompt_tokens"], "prompt tokens, cached:", details.get("cached_tokens"))
