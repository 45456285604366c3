"""A folder with a tokenizer and a chat template that does what a message asks for, and its pool."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spark_engine.engine_file import TOKENIZER
from spark_engine.interface import Limits
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.server.prompts.contract import Setup
from spark_engine.runtime.server.prompts.pool import WorkerPool
from tests.runtime import small_tokenizer

LOOP, MEMORY = "loop for ever", "take memory"
TEMPLATE = (
    "{% set said = messages[-1].content %}"
    "{% if said == '" + LOOP + "' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif said == '"
    + MEMORY
    + "' %}{{ (said * 10 ** 9)|length }}{% endif %}"
    + small_tokenizer.TEMPLATE
)
INFO = EngineInfo("fake", Limits(max_seqs=4, max_context=2048, pages=2048, vocab=512), (1,))
SETUP = Setup(INFO, ("fake",), ChatOptions(), False, 8)


def write(folder: Path, template: str = TEMPLATE) -> Path:
    small_tokenizer.write(folder / TOKENIZER)
    (folder / TOKENIZER / "chat_template.jinja").write_text(template)
    return folder


def body(said: Any = "hi", size: int = 0) -> list[list[bytes]]:
    """A chat's body, of at least `size` bytes."""
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 2, "junk": "x" * size}
    return [[json.dumps(body).encode()]]


@contextmanager
def running(folder: Path) -> Iterator[tuple[asyncio.Runner, WorkerPool]]:
    """A pool of the folder, and the loop that it belongs to."""
    with asyncio.Runner() as runner:
        pool = runner.run(_started(folder))
        try:
            yield runner, pool
        finally:
            runner.run(pool.close())


async def _started(folder: Path) -> WorkerPool:
    pool = WorkerPool(folder)
    try:
        await pool.start(SETUP)
    except BaseException:
        await pool.close()
        raise
    return pool
