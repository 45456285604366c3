"""Answers of the embedded model to random schemas, many at a time on its CPU engine.

`python -m tests.runtime.structured.embedded SCHEMAS PROMPTS` prints how many answers ended, and the
first that its schema does not allow. `make forms` runs 200 schemas by 3 prompts.
"""

import json
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.engine_file import TOKENIZER
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Event, FinishReason, Request, SamplingParams
from spark_engine.runtime.server.engine_client.engine_folder import read_info
from spark_engine.runtime.server.prompts.text_files import read_text
from spark_engine.runtime.structured.constraints import constraint_for
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.structured.matcher import Grammars
from spark_engine.runtime.text.reply_formats import Formats
from tests.repository import ROOT
from tests.runtime.engine.invariants import check_idle
from tests.runtime.structured.schemas import draw

QUESTIONS = ("What is a promise?", "What did the bear see?", "Answer in JSON, please.")
OPTIONS = Options(decode=(16,), prefill=(64,), max_context=512, max_seqs=16, kv_tokens=8192)
MOST = 120  # tokens of an answer


class NotOfSchema(Exception):
    """A complete answer that its schema does not allow."""


def run(folder: Path, schemas: int, prompts: int, most: int = MOST) -> Counter[FinishReason | None]:
    """Number of answers by finish reason. Raises NotOfSchema."""
    build(ROOT / "models/tiny/checkpoint", folder, OPTIONS, lambda text: None)
    info, (tokenizer, template) = read_info(folder), read_text(folder)
    assert tokenizer is not None and template is not None
    grammars = Grammars.of(folder / TOKENIZER, info.limits.vocab, info.eos_token_ids)
    engine = Engine.open(folder, EngineOptions(grammars=grammars))
    asked: dict[int, dict[str, Any]] = {}
    for number in range(schemas * prompts):
        schema, variant = draw(number // prompts), number % prompts
        thinking = variant == 2
        message = {"role": "user", "content": QUESTIONS[variant % len(QUESTIONS)]}
        text = template.render([message], options={"enable_thinking": thinking})
        known = Formats(), tokenizer, grammars
        body = StructuredFields(guided_json=schema)
        bound = constraint_for(body, (), None, *known, thinking=thinking)
        params = SamplingParams(temperature=1.2 * (number % 2), max_tokens=most, seed=number)
        request = Request(tuple(tokenizer.encode(text)), params)
        asked[engine.submit(replace(request, constraint=bound))] = schema
    events: dict[int, list[Event]] = {number: [] for number in asked}
    while not engine.idle:
        for event in engine.step():
            events[event.request_id].append(event)
    check_idle(engine)
    engine.close()
    for number, heard in events.items():
        if heard[-1].finish is FinishReason.STOP:
            ids = [event.token for event in heard if event.token is not None]
            _check(tokenizer.decode(ids).rpartition("</think>")[2], asked[number])
    return Counter(heard[-1].finish for heard in events.values())


def _check(text: str, schema: dict[str, Any]) -> None:
    try:
        Draft202012Validator(schema).validate(json.loads(text))
    except Exception as error:
        raise NotOfSchema(f"{text!r} is not of {json.dumps(schema)}: {error}") from error


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as given:
        for reason, count in run(Path(given) / "engine", *map(int, sys.argv[1:3])).items():
            print(f"{count} answers ended with {reason}")
