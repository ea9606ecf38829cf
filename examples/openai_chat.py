"""A conversation that changes its model, with the official client.

pip install openai
OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/openai_chat.py small big

Prints both answers, and how the client tells an error.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai


def main(first: str, second: str) -> None:
    """Ask one model, then the other one in the same conversation, then one that is not there."""
    client = openai.OpenAI(max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "What is a key-value cache?"}]
    answer = client.chat.completions.create(model=first, messages=messages, max_tokens=40, temperature=0)
    said = answer.choices[0].message.content
    print(f"{answer.model}: {said}")

    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And how large does it get?"}]
    print(f"{second}: ", end="")
    told: Any = None
    with client.chat.completions.create(
        model=second, messages=messages, max_tokens=40, temperature=0, stream=True, extra_body={"kvlingo": {"tail": 4}}
    ) as stream:
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
            told = (chunk.model_extra or {}).get("kvlingo") or told
    print(f"\nkvlingo: {json.dumps(told)}")

    try:
        client.chat.completions.create(model="nobody", messages=messages)
    except openai.NotFoundError as error:
        print(f"error: {type(error).__name__} {error.status_code} {error.code}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
