"""A conversation that changes its model, through litellm.

pip install litellm
OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/litellm_chat.py small big

Prints both answers, and how the client tells an error.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches a price list when it is imported

import litellm


def main(first: str, second: str) -> None:
    """Ask one model, then the other one in the same conversation, then one that is not there."""
    server = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    asked: dict[str, Any] = {**server, "max_tokens": 40, "temperature": 0}
    messages = [{"role": "user", "content": "What is a key-value cache?"}]
    answer: Any = litellm.completion(model=f"openai/{first}", messages=messages, **asked)
    said = answer.choices[0].message.content
    print(f"{first}: {said}")

    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And how large does it get?"}]
    print(f"{second}: ", end="")
    dial = {"kvlingo": {"tail": 4}}
    for chunk in litellm.completion(model=f"openai/{second}", messages=messages, stream=True, extra_body=dial, **asked):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    try:
        litellm.completion(model="openai/nobody", messages=messages, **server)
    except litellm.NotFoundError as error:
        print(f"error: {type(error).__name__} {error.status_code}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
