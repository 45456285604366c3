"""Continues prompts. `python examples/generate.py [ENGINE]`; without ENGINE the embedded model."""

import sys

from spark_engine import LLM, SamplingParams

prompts = ["Once upon a time", "The little bear", "One day, Tom"]
params = SamplingParams(max_tokens=24, temperature=0.7, seed=1)
with LLM(*sys.argv[1:2]) as llm:
    for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True):
        print(prompt + answer.text)
        print(f"[{answer.usage.completion_tokens} tokens, {answer.finish_reason}]\n")
