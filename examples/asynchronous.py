"""Several requests of one event loop. `python examples/asynchronous.py [ENGINE]`"""

import asyncio
import sys

from spark_engine import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=16, temperature=0)


async def tell(llm: LLM, prompt: str) -> str:
    return prompt + "".join([chunk.text async for chunk in llm.astream(prompt, PARAMS)])


async def main(llm: LLM) -> None:
    answers = asyncio.create_task(llm.agenerate(["One day, Tom", "A bird"], PARAMS))
    stories = [tell(llm, prompt) for prompt in ("Once upon a time", "The little bear")]
    print(*await asyncio.gather(*stories), sep="\n")
    print(*(answer.text for answer in await answers), sep="\n")


with LLM(*sys.argv[1:2]) as opened:
    asyncio.run(main(opened))
