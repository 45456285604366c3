"""Several requests of one event loop. `python examples/asynchronous.py [ENGINE]`"""

import asyncio
import sys

from spark_engine import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=16, temperature=0)


async def tell(llm: LLM, prompt: str) -> str:
    return prompt + "".join([chunk.text async for chunk in llm.astream(prompt, PARAMS)])


async def main(llm: LLM) -> None:
    stories = [tell(llm, prompt) for prompt in ("Once upon a time", "The little bear")]
    answers = llm.agenerate(["One day, Tom", "A bird"], PARAMS)
    *told, found = await asyncio.gather(*stories, answers)
    print(*told, *(answer.text for answer in found), sep="\n")


with LLM(*sys.argv[1:2]) as opened:
    asyncio.run(main(opened))
