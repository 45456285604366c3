"""Images in `LLM.chat` and in batch files, with the embedded model's tower of random weights."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spark_engine.errors import RequestError
from spark_engine.progress import Progress
from spark_engine.runtime.offline.batch import run_batch
from spark_engine.runtime.offline.llm import LLM
from spark_engine.runtime.offline.params import SamplingParams
from spark_engine.runtime.server.process.options import ServerOptions
from tests.clients import tower_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    few = {"decode": (2,), "prefill": (128,), "drafts": 0, "max_seqs": 2, "max_context": 512}
    yield tower_model.engine(tmp_path_factory.mktemp("tower"), **few)


def _uri(change: int = 0) -> str:
    values = np.random.default_rng(0).integers(0, 256, (256, 288, 3), np.uint8)
    values[50, 70, 1] ^= change
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _chat(*uris: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what is this?"}]
    parts += [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    return [{"role": "user", "content": parts}]


def test_chats_with_images(engine: Path) -> None:
    """A pixel makes another answer; the same image in another request and next to itself is read
    from the cache; together and alone give the same tokens."""
    chats = [_chat(_uri(), _uri()), _chat(_uri(64)), _chat(_uri())]
    with LLM(engine) as llm:
        alone = [llm.chat(chat, PARAMS)[0] for chat in chats]
        again = llm.chat(chats, PARAMS)
        with pytest.raises(RequestError, match=r"messages\[0\].content\[1\].image_url.url: "):
            llm.chat(_chat("https://a.example/b.png"), PARAMS)
    tokens = [answer.token_ids for answer in alone]
    assert tokens == [answer.token_ids for answer in again] and tokens[1] != tokens[2]
    sizes = [answer.usage.prompt_tokens for answer in alone]
    assert sizes[0] - sizes[2] == 8 * 9 + 2 and sizes[1] == sizes[2]
    assert all(answer.usage.cached_tokens for answer in again)


def test_lines_of_a_batch_with_images(engine: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    block = {"type": "base64", "media_type": "image/png", "data": _uri().partition(",")[2]}
    item = {"type": "input_image", "image_url": _uri()}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": _chat(_uri()), "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": _chat("data:image/png;base64,AAAA")}),
        ("/v1/messages", {"messages": [_user({"type": "image", "source": block})]}),
        ("/v1/responses", {"input": [_user(item)], "max_output_tokens": 4}),
    ]
    bodies[2][1]["max_tokens"] = 4
    rows = [
        {"custom_id": str(i), "method": "POST", "url": url, "body": body}
        for i, (url, body) in enumerate(bodies)
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    run_batch(source, target, engine, ServerOptions(), Progress(None))
    found = {row["custom_id"]: row["response"] for row in map(json.loads, target.open())}
    assert [found[str(i)]["status_code"] for i in range(4)] == [200, 400, 200, 200]
    usage = [found[i]["body"]["usage"] for i in "023"]
    assert usage[0]["prompt_tokens_details"]["image_tokens"] == 72
    assert usage[2]["input_tokens_details"]["image_tokens"] == 72
    # Of the same image and text, a line that ended before may have left pages to this one.
    assert 72 < usage[1]["input_tokens"] + usage[1]["cache_read_input_tokens"] < 72 + 40
    assert found["1"]["body"]["error"]["param"] == "messages[0].content[1].image_url.url"


def _user(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [part]}
