"""Times the masks of forms of answers with the served vocabulary, token by token of an answer.

`python -m benchmarks.time_masks` prints, in microseconds of one thread: making the grammar, the
mean and the longest mask of a sequence's own, and the share of masks over 50 us. Knows no engine:
an engine makes them in other threads during its launches. Needs the test extra (the vocabulary's
package).
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.runtime.structured.constraints import constraint_for
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.structured.matcher import Grammars, Matcher
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.runtime import qwen_vocabulary

VOCAB, ENDS = 248_320, (248_046, 248_044)
AIM_US, ROUNDS = 50.0, 20
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "kept", "gone"]}},
        "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "text"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
SAID = "The rain in Spain stays mainly in the plain, says the song; 猫は座っている, café."
ANSWER = json.dumps(
    {"name": "Ada Lovelace", "age": 36, "tags": ["new", "kept"], "text": SAID}, ensure_ascii=False
)
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nSão Paulo, near the <b>old</b> station\n"
    "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
XML, OBJECT = Formats(), Formats(tools="hermes")
HERMES = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "São Paulo, near the old station", '
    '"days": 3}}\n</tool_call>'
)
ROWS: tuple[tuple[str, dict[str, Any], str, Formats, str], ...] = (
    ("JSON object", {"response_format": {"type": "json_object"}}, "none", XML, ANSWER),
    ("JSON schema", {"guided_json": PERSON}, "none", XML, ANSWER),
    ("call, XML", {}, "required", XML, CALL),
    ("call, JSON", {}, "required", OBJECT, HERMES),
    ("regex", {"guided_regex": r"\d{4}-\d{2}-\d{2} [A-Z][a-z]+"}, "none", XML, "2026-11-22 Ada"),
    ("choice", {"guided_choice": ["positive", "negative"]}, "none", XML, "positive"),
)


def time_masks(matcher: Matcher, ids: list[int]) -> list[float]:
    """Microseconds of each mask of an answer."""
    row, times = np.zeros(-(-VOCAB // 32), np.uint32), []
    for token in ids:
        begin = time.perf_counter()
        matcher.fill(row)
        times.append((time.perf_counter() - begin) * 1e6)
        matcher.advance(token)
    return times


def main() -> None:
    with tempfile.TemporaryDirectory() as given:
        folder = qwen_vocabulary.write(Path(given))
        tokenizer = Tokenizer.load(folder)
    grammars = Grammars(lambda: tokenizer, VOCAB, ENDS)
    begin = time.perf_counter()
    grammars('start: "a"')
    print(f"ready after {time.perf_counter() - begin:.2f} s ({len(tokenizer)} tokens)\n")
    print("| form | tokens | made | mean | longest | over 50 us |\n|---|---|---|---|---|---|")
    for name, fields, choice, formats, answer in ROWS:
        body = StructuredFields(**fields)
        begin = time.perf_counter()
        spec = constraint_for(body, TOOLS, choice, formats, tokenizer, grammars)
        made = (time.perf_counter() - begin) * 1e6
        assert spec is not None
        ids, times = tokenizer.encode(answer), []
        for _ in range(ROUNDS):  # each of a sequence's own, as in an engine
            times += time_masks(grammars(spec.grammar), ids)
        slow = sum(t > AIM_US for t in times) / len(times)
        mean, most = sum(times) / len(times), max(times)
        print(f"| {name} | {len(ids)} | {made:.0f} | {mean:.1f} | {most:.0f} | {slow:.1%} |")


if __name__ == "__main__":
    main()
