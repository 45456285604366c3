"""Whom a client's script asks, and what: `with_NAME.py URL MODEL`, URL without `/v1`."""

import sys
from pathlib import Path

URL, MODEL = (sys.argv[1:] + ["http://127.0.0.1:8000", "tiny"])[:2]
V1 = f"{URL}/v1"
KEY = "any"  # the server asks for none; clients want one
OPENAI = {"base_url": V1, "api_key": KEY, "max_retries": 0}
SUM, ANSWER = "What is 3 plus 4?", "3 + 4 = 7."  # the embedded model knows
NEXT, STORY = "What is 5 plus 4?", "Once upon a time"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
PNG = (  # one pixel, which becomes 32 x 32: one token
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPj/HwADBwIAMCbHYQAAAABJRU5E"
    "rkJggg=="
)
PICTURE = f"data:image/png;base64,{PNG}"
CHECKPOINT = Path(__file__).parents[3] / "models" / "tiny" / "checkpoint"  # for its tokenizer
