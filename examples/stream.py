"""Prints an answer while it is generated. `python examples/stream.py [ENGINE]`"""

import sys

from spark_engine import LLM, SamplingParams

with LLM(*sys.argv[1:2]) as llm:
    for chunk in llm.stream("Once upon a time", SamplingParams(max_tokens=30, temperature=0)):
        print(chunk.text, end="", flush=True)
        if chunk.completion is not None:  # the last one has the whole answer
            print(f"\n[{chunk.completion.usage.completion_tokens} tokens]")
