"""Chat templates as transformers renders them: the oracle of ours."""

from __future__ import annotations

from typing import Any


def transformers_render(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

    rendered, _ = render_jinja_template(
        [_normalize_chat_messages(messages)], chat_template=source, **{"add_generation_prompt": True, **variables}
    )
    return str(rendered[0])
