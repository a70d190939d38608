"""What a person is shown once a server is ready: a request to try."""

from __future__ import annotations

import shlex


def curl_line(url: str, chat: bool, api_key: str | None) -> str:
    """A curl command for a first answer; a model without a chat template gets a completion."""
    path, body = "completions", '{"prompt": "The sky is blue because", "max_tokens": 80, "temperature": 0}'
    if chat:
        path = "chat/completions"
        body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 80, "temperature": 0}'
    login = f" -H {shlex.quote(f'Authorization: Bearer {api_key}')}" if api_key else ""
    return f"curl {url}/v1/{path}{login} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
