"""A conversation of two turns. `python examples/chat.py [ENGINE]`"""

import sys
from typing import Any

from spark_engine import LLM, SamplingParams

params = SamplingParams(max_tokens=200, temperature=0)
messages: list[dict[str, Any]] = []
with LLM(*sys.argv[1:2]) as llm:
    for question in ("What is 3 plus 4?", "What is 20 minus 5?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, params)[0]
        print(f"{question}\n  reasoning: {answer.reasoning}\n  answer: {answer.text}")
        messages.append(answer.message or {})  # the assistant's turn, with its reasoning and calls
