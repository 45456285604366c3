"""An answer that is JSON of a schema. `python examples/json_schema.py [ENGINE]`"""

import json
import sys

from spark_engine import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "animal": {"enum": ["bear", "bird", "dog"]},
    },
    "required": ["name", "age", "animal"],
    "additionalProperties": False,
}
with LLM(*sys.argv[1:2]) as llm:
    params = SamplingParams(max_tokens=200, temperature=0, json_schema=SCHEMA)
    messages = [{"role": "user", "content": "Tell me about a pet."}]
    answer = llm.chat(messages, params, enable_thinking=False)[0]
    print(json.loads(answer.text))
