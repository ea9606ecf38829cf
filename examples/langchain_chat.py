"""A conversation that changes its model, with LangChain.

pip install langchain-openai
OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/langchain_chat.py small big

Prints both answers, and how the client tells an error.
"""

from __future__ import annotations

import os
import sys

import openai
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_openai import ChatOpenAI


def main(first: str, second: str) -> None:
    """Ask one model, then the other one in the same conversation, then one that is not there."""
    messages: list[BaseMessage] = [HumanMessage("What is a key-value cache?")]
    answer = chat_with(first).invoke(messages)
    print(f"{first}: {answer.text}")

    messages += [answer, HumanMessage("And how large does it get?")]
    print(f"{second}: ", end="")
    for piece in chat_with(second, extra_body={"kvlingo": {"tail": 4}}).stream(messages):
        print(piece.text, end="", flush=True)
    print()

    try:
        chat_with("nobody").invoke(messages)
    except openai.NotFoundError as error:
        print(f"error: {type(error).__name__} {error.status_code} {error.code}")


def chat_with(model: str, **more: object) -> ChatOpenAI:
    """Return a chat model of the server."""
    server = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    return ChatOpenAI(model=model, max_retries=0, temperature=0, max_tokens=40, **server, **more)


if __name__ == "__main__":
    main(*sys.argv[1:3])
