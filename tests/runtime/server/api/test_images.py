"""Images of chats, from each API's body to the request that reaches the engine."""

import base64
import io
import itertools
import json
import random
import sys
from functools import cache
from typing import Any

import pytest
from PIL import Image as Picture
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from spark_engine.errors import EngineError, OptionError
from spark_engine.runtime.images.decode import decode
from spark_engine.runtime.images.sizes import BadImage
from spark_engine.runtime.server.api import stored_items
from spark_engine.runtime.server.prompts import preparer, prompt_images
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.server.service import service as service_module
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.image_parts import find_images
from spark_engine.runtime.text.tokenizer import Tokenizer
from spark_engine.vision import VisionInfo
from tests.repository import ROOT
from tests.runtime import small_tokenizer
from tests.runtime.server.api import api_client
from tests.runtime.server.api.api_client import CHAT, MESSAGES, RESPONSES, ApiClient, tool_result

APIS = (CHAT, MESSAGES, RESPONSES)
WORDS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
NOTE = "[an image that this model cannot see]"
# As Qwen's: parts in lists, a number for each picture if asked for, none in system messages.
TEMPLATE = """\
{%- set count = namespace(value=0) -%}
{%- macro show(content, system=false) -%}
{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content or [] -%}
{%- if part.type in ('image', 'image_url') or 'image_url' in part -%}
{%- if system -%}{{ raise_exception('System message cannot contain images.') }}{%- endif -%}
{%- set count.value = count.value + 1 -%}
{%- if add_vision_id -%}{{ 'Picture ' ~ count.value ~ ': ' }}{%- endif -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + show(message.content, message.role == 'system')|trim -}}
{%- for call in message.tool_calls or [] -%}{{ call | tojson }}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}
"""


@cache
def tokenizer() -> Tokenizer:
    backend = Backend.from_str(small_tokenizer.train())
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in WORDS])
    special = (i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    return Tokenizer(backend, frozenset(special))


def vision() -> VisionInfo:
    start, pad, end = (tokenizer().id_of(word) or 0 for word in WORDS)
    half = (0.5, 0.5, 0.5)
    return VisionInfo(16, 2, 32 * 32, 256 * 256, half, half, pad, start, end)


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "tokenizer", tokenizer)


def server(template: str = TEMPLATE, **chat: Any) -> ApiClient:
    options = {"vision": vision(), "chat": ChatOptions(**chat)}
    return ApiClient("Hello", template=ChatTemplate(template), service=options)


@cache
def png(width: int = 64, height: int = 32, colour: str = "red") -> bytes:
    file = io.BytesIO()
    Picture.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def uri(data: bytes | None = None) -> str:
    return f"data:image/png;base64,{base64.b64encode(png() if data is None else data).decode()}"


def part(path: str, url: Any = None, **more: Any) -> dict[str, Any]:
    """An image in the form of an API."""
    url = uri() if url is None else url
    if path == CHAT:
        return {"type": "image_url", "image_url": {"url": url, **more}}
    if path == RESPONSES:
        return {"type": "input_image", "image_url": url, **more}
    if not isinstance(url, str) or not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    kind, data = url[5:].split(";base64,") if ";base64," in url else ("image/png", url)
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def words(path: str, text: str) -> dict[str, str]:
    return {"type": "input_text" if path == RESPONSES else "text", "text": text}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


SAID = {"role": "assistant", "content": "yes"}


def result(path: str, *content: Any, name: str = "f") -> list[Any]:
    return tool_result(path, list(content), name)


def post(served: ApiClient, path: str, messages: list[Any], **more: Any) -> Any:
    field = "input" if path == RESPONSES else "messages"
    return served.post(path, {field: messages, "max_tokens": 9, **more})


def refused(served: ApiClient, path: str, messages: list[Any], **more: Any) -> Any:
    """The error."""
    answer = post(served, path, messages, **more)
    assert answer.status_code == 400, answer.text
    assert len(answer.text) < 600, "the data are not repeated"
    return answer.json()["error"]


def ask(served: ApiClient, path: str, messages: list[Any], **more: Any) -> Any:
    """The request that reaches the engine; what its images say is checked."""
    answer = post(served, path, messages, **more)
    assert answer.status_code == 200, answer.text
    request, seen = served.client.submitted[-1], vision()
    ids = list(request.prompt)
    pads = [i for i, token in enumerate(ids) if token == seen.image_id]
    assert pads == [i for image in request.images for i in range(image.start, image.end)]
    for image in request.images:
        around = ids[image.start - 1], ids[image.end]
        assert around == (seen.start_id, seen.end_id)
        assert len(image.pixels) == image.tokens * seen.unit**2 * 3 and len(image.digest) == 16
    assert ids.count(seen.start_id) == ids.count(seen.end_id) == len(request.images)
    request.check(served.service.info.limits, (1,), served.service.info.vision)
    counts = MESSAGES + "/count_tokens" if path == MESSAGES else "/tokenize"
    count = served.post(counts, {"messages": messages, **more})
    if path != RESPONSES and "previous" not in str(list(more)):
        row = count.json()
        assert row.get("count", row.get("input_tokens")) == len(ids), row
    return request


def text_of(request: Any) -> str:
    return tokenizer().decode(list(request.prompt), skip_special=False)


@pytest.mark.parametrize("path", APIS)
def test_images_reach_the_engine_from_every_place(path: str) -> None:
    served = server()
    sizes = {"red": (64, 32), "blue": (96, 96), "green": (33, 120)}
    red, blue, green = (part(path, uri(png(*size, c))) for c, size in sizes.items())
    first = user(words(path, "a"), red, blue, words(path, "b"))
    request = ask(served, path, [first, *result(path, green, red)])
    want = [decode(png(*sizes[c], c), vision()) for c in ("red", "blue", "green", "red")]
    got = [(i.rows, i.columns, i.pixels, i.digest) for i in request.images]
    assert got == [(i.rows, i.columns, i.pixels, i.digest) for i in want]
    assert request.images[0].tokens == 2 and request.images[0].digest == request.images[3].digest
    assert f"a{WORDS[0]}{2 * WORDS[1]}{WORDS[2]}{WORDS[0]}" in text_of(request)
    assert NOTE not in text_of(request)


def test_other_forms_of_an_image() -> None:
    served, data = server(), base64.b64encode(png()).decode()
    for content in (
        [{"type": "image_url", "image_url": uri(), "detail": "low"}],
        [{"type": "image_url", "image_url": {"url": uri(), "detail": None}}],
        [{"image_url": {"url": f"DATA:image/png;charset=x;base64,{data}"}}],
        [{"type": "image", "data": data, "mimeType": "image/png"}],
        [part(CHAT, f"data:image/png;base64,{base64.encodebytes(png(90, 90)).decode()}")],
        [part(CHAT, uri().replace("AA", "AA\r\n"))],
        [{"type": "document", "source": {"type": "content", "content": [part(CHAT)]}}],
        part(CHAT),
    ):
        assert len(ask(served, CHAT, [{"role": "user", "content": content}]).images) == 1
    shot = {"type": "computer_screenshot", "image_url": uri()}
    item = {"type": "computer_call_output", "call_id": "c", "output": shot}
    assert len(ask(served, RESPONSES, [item]).images) == 1
    inside = {"type": "document", "source": {"type": "content", "content": [part(MESSAGES)]}}
    assert len(ask(served, MESSAGES, result(MESSAGES, inside)).images) == 1
    large = [part(CHAT, uri(png(900, 900)), detail=detail) for detail in ("low", "high")]
    limited = ask(server(max_image_pixels=64 * 64), CHAT, [user(*large)])
    assert [image.tokens for image in limited.images] == [4, 4]


@pytest.mark.parametrize("path", APIS)
def test_results_of_tools_that_are_the_json_of_parts(path: str) -> None:
    served, data = server(), base64.b64encode(png()).decode()
    said = {"type": "text", "text": "the page"}
    mcp = {"type": "image", "data": data, "mimeType": "image/png", "annotations": None}
    blob = {"type": "resource", "resource": {"uri": "a", "mimeType": "image/png", "blob": data}}
    read: tuple[Any, ...] = ([said, mcp], [blob], mcp, {"content": [mcp, said], "isError": False})
    read += ([part(path), said], [said, part(CHAT)], [part(MESSAGES)])
    for value in read:
        text = json.dumps(value, indent=len(str(value)) % 2 or None)
        whole = result(path, name="f")
        holder = whole[2]["content"][0] if path == MESSAGES else whole[2]
        holder["output" if path == RESPONSES else "content"] = text
        for messages in (whole, result(path, words(path, "see"), words(path, text))):
            request = ask(served, path, messages)
            assert len(request.images) == 1 and data[:20] not in text_of(request), value
            assert ("the page" in text_of(request)) == ("the page" in text)
    bare = ask(served, path, result(path, blob)) if path == CHAT else None
    assert bare is None or len(bare.images) == 1
    kept: tuple[Any, ...] = ({"screenshot": uri()}, [uri()], [said], {"type": "image", "url": "a"})
    kept += ([mcp, {"type": "button"}], [{"rows": [mcp]}], {"image": data}, {"content": [[mcp]]})
    for value in kept:
        text = json.dumps(value)
        request = ask(served, path, result(path, words(path, text)))
        assert not request.images and text in text_of(request), value
    for text in ('{"type": "image", "data":', '["image"]', "[] image", "[" * 900 + '"image"'):
        request = ask(served, path, result(path, words(path, text)))
        assert text in text_of(request)
    holder = [{"role": "tool", "content": "[" * 500_000 + '"image"'}]
    assert find_images(holder, "messages") == [], "nesting without end"
    # of a user it is what the user wrote
    request = ask(served, path, [user(words(path, json.dumps([mcp])))])
    assert not request.images and data in text_of(request)


@pytest.mark.parametrize("add_id", [False, True])
def test_the_prompt_is_what_the_template_writes(add_id: bool) -> None:
    first, second = part(CHAT, uri(png(64, 64))), part(CHAT)
    said = [*result(CHAT, first), SAID, user(words(CHAT, " a "), second, words(CHAT, "b\n"))]
    request = ask(server(), CHAT, said, chat_template_kwargs={"add_vision_id": add_id})
    template = ChatTemplate(TEMPLATE)._template
    text = template.render(messages=said, add_generation_prompt=True, add_vision_id=add_id)
    pieces = text.split(WORDS[1])
    assert len(pieces) == 3 and add_id == ("Picture 2: <|vision" in text)
    counts = [image.tokens for image in request.images]
    whole = pieces[0] + counts[0] * WORDS[1] + pieces[1] + counts[1] * WORDS[1] + pieces[2]
    # the arguments of calls are objects in the one and text in the other
    assert text_of(request) == whole.replace('"arguments": "{}"', '"arguments": {}')
    assert list(request.prompt) == tokenizer().encode(text_of(request))


STRICT = (ROOT / "models/tiny/checkpoint/chat_template.jinja").read_text()


@pytest.mark.parametrize("template", [small_tokenizer.TEMPLATE, STRICT], ids=["small", "tiny"])
def test_templates_that_know_no_images(template: str) -> None:
    request = ask(server(template), CHAT, [user(words(CHAT, "a"), part(CHAT), words(CHAT, "b"))])
    assert f"a{WORDS[0]}{2 * WORDS[1]}{WORDS[2]}b" in text_of(request)


@pytest.mark.parametrize("path", APIS)
def test_words_of_clients_never_become_images(path: str) -> None:
    served, draw = server(), random.Random(path)
    parts = (*WORDS, "<|vision_start|><|image_pad|><|vision_end|>", " ", "x", "<|", "é", "\n", "|>")
    for turn in range(12):
        say = ["".join(draw.choices(parts, k=7)) for _ in range(5)]
        messages = [
            user(words(path, say[0]), *[part(path)] * (turn % 3), words(path, say[1])),
            *result(path, words(path, say[2]), *[part(path)] * (turn % 2), name=say[3]),
        ]
        more: dict[str, Any] = {"system": say[4]} if path == MESSAGES else {}
        if path == CHAT:
            messages.insert(0, {"role": "system", "content": say[4]})
            function = {"name": say[3], "description": say[2]}
            more["tools"] = [{"type": "function", "function": function}]
        elif path == RESPONSES:
            more["instructions"] = say[4]
        request = ask(served, path, messages, **more)
        assert len(request.images) == turn % 3 + turn % 2
        prompt = text_of(request)
        assert all(text.strip() in prompt for text in (say[2], say[4]))
    for body in ({"prompt": WORDS[1] * 3}, {"prompt": [WORDS[0], "a"]}):
        assert served.post("/v1/completions", body).status_code == 200
        assert not set(served.client.submitted[-1].prompt) & set(tokenizer().special)


BAD: list[tuple[Any, str]] = [
    ("data:image/png;base64,AAAA", "is not read"),
    (uri(png()[:60]), "truncated"),
    ("data:image/png;base64,A", "not valid base64"),
    ("data:image/png;base64,AA AA", "not valid base64"),
    ("data:image/png;base64,é", "not valid base64"),
    ("data:image/png,raw", "base64"),
    ("https://example.org/a.png", "--media-domains"),
    ("HTTP://example.org/a.png", "--media-domains"),
    ("file:///etc/passwd", "no base64 data URI"),
    ("", "send the image"),
    (7, "send the image"),
    ({"a": 1}, "send the image"),
]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(("url", "said"), BAD)
def test_a_bad_image_is_refused_now_and_a_note_later(path: str, url: Any, said: str) -> None:
    served = server()
    bad = part(path, url)
    field = "input" if path == RESPONSES else "messages"
    history = [user(words(path, "a")), SAID]
    error = refused(served, path, [*history, user(words(path, "b"), bad)])
    assert said in error["message"]
    source = bad.get("source", {"type": ""})["type"]
    place = {CHAT: ".image_url.url", RESPONSES: ".image_url"}.get(path)
    place = place or (".source.data" if source == "base64" else ".source.url")
    if not (path == RESPONSES and isinstance(url, dict)):
        place = f"{field}[2].content[1]{place}"
        assert place in error["message"]
        assert path == MESSAGES or error["param"] == place
    good = part(path)
    for messages in (
        [user(bad), SAID, user(good)],
        [user(bad), user(words(path, "again"), good)],  # after the error, without an answer
        [*result(path, bad, good)],
        [{"role": "assistant", "content": [bad, good]}, user(words(path, "a"))],
    ):
        request = ask(served, path, messages)
        assert NOTE in text_of(request) and len(request.images) == 1


def test_what_is_refused_by_name() -> None:
    served = server()
    for path, bad, said in (
        (RESPONSES, {"type": "input_image", "file_id": "f-1"}, "content[0].file_id: it is 'f-1'"),
        (MESSAGES, {"type": "image", "source": {"type": "file", "file_id": "f"}}, "source.file_id"),
        (MESSAGES, {"type": "image", "source": {"type": "x"}}, "source.type: it is 'x'"),
        (MESSAGES, {"type": "image"}, "content[0].image_url: it is None"),
        (CHAT, {"type": "video_url", "video_url": {"url": "u"}}, "content[0] is a video"),
        (RESPONSES, {"type": "input_video", "video": "u"}, "content[0] is a video"),
        (CHAT, part(CHAT, detail="huge"), "detail is 'huge'"),
        (CHAT, part(CHAT, detail=[3]), "detail is [3]"),
    ):
        assert said in refused(served, path, [user(bad)])["message"]
        request = ask(served, path, [user(bad), SAID, user(words(path, "a"))])
        assert not request.images and "that this model cannot see]" in text_of(request)
    for path, more in ((MESSAGES, {"system": [part(MESSAGES)]}), (CHAT, {})):
        head = [] if more else [{"role": "system", "content": [part(CHAT)]}]
        error = refused(served, path, [*head, user(words(path, "a"))], **more)
        assert "System message cannot contain images." in error["message"]
    note = {"system": [part(MESSAGES, "data:,")]}
    assert ask(served, MESSAGES, [user(part(MESSAGES))], **note).images
    assert NOTE in text_of(served.client.submitted[-1])
    image = user(part(CHAT))
    for more in ({"prompt_logprobs": 1}, {"truncate_prompt_tokens": 2}):
        assert list(more)[0] in refused(served, CHAT, [image], **more)["param"]
    assert post(served, CHAT, [image], truncate_prompt_tokens=-1).status_code == 200


def test_images_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    image, text = part(CHAT), words(CHAT, "a")
    served = server(max_images=3)
    for old in range(8):
        request = ask(served, CHAT, [*[user(image), SAID] * old, user(image, text, image)])
        kept = min(old + 2, 3)
        assert len(request.images) == kept
        prompt = text_of(request)
        assert prompt.count(NOTE) == old + 2 - kept and prompt.rfind(NOTE) < prompt.find(WORDS[0])
    error = refused(served, CHAT, [user(*[image] * 4)])
    assert "4 images in the last message" in error["message"]
    # above the limit a quarter of it goes at a time: in between the prompt only grows
    counts = [len(ask(server(max_images=8), CHAT, [user(image), SAID] * n).images) for n in (8, 9)]
    assert counts == [8, 7]
    off = server(max_images=0)
    assert post(off, CHAT, [user(image)]).status_code == 200
    prompt = text_of(off.client.submitted[-1])
    assert NOTE in prompt and WORDS[1] not in prompt and not off.client.submitted[-1].images
    monkeypatch.setattr(prompt_images, "MOST_PIXELS", 3 * 64 * 32 * 2)
    request = ask(server(), CHAT, [*[user(image), SAID] * 5, user(image)])
    assert len(request.images) == 2
    error = refused(server(), CHAT, [user(image, image, image)])
    assert "pixels together" in error["message"]
    monkeypatch.undo()
    monkeypatch.setattr(prompt_images, "MOST_BYTES", 40)
    monkeypatch.setattr(api_client, "tokenizer", tokenizer)
    error = refused(server(), CHAT, [user(image)])
    assert "url: the image has over" in error["message"]


def test_prompts_that_do_not_fit_and_choices() -> None:
    served = server()
    many = [part(CHAT, uri(png(256, 256, c))) for c in ("red", "green", "blue")]
    answer = post(served, CHAT, [user(*many * 10)])  # 64 tokens each, of 2048
    assert ask(served, CHAT, [user(*many * 10)]).images[29].tokens == 64
    assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 1920
    error = refused(served, CHAT, [user(*many * 10, many[0], many[1])])
    assert "2048 tokens" in error["message"] and error["code"] == "context_length_exceeded"
    before = len(served.client.submitted)
    assert post(served, CHAT, [user(many[0])], n=2).status_code == 200
    first, second = served.client.submitted[before:]
    assert first.images is second.images and first.images[0].pixels
    usage = post(served, MESSAGES, [user(part(MESSAGES))]).json()["usage"]
    assert usage["input_tokens"] == len(served.client.submitted[-1].prompt)
    usage = post(served, RESPONSES, [user(part(RESPONSES))]).json()["usage"]
    assert usage["input_tokens_details"]["image_tokens"] == 2


def test_a_stored_conversation_keeps_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    served = server()
    more = {"store": True, "max_output_tokens": 9}
    shot = {"type": "computer_screenshot", "image_url": uri()}
    items = [
        user(part(RESPONSES, uri(png(96, 96)))),
        {"type": "computer_call_output", "call_id": "c", "output": shot},
        user(words(RESPONSES, "what?")),
    ]
    first = post(served, RESPONSES, items, **more).json()
    for said in ("more", [user(words(RESPONSES, "more"), part(RESPONSES))]):
        body = {"input": said, "previous_response_id": first["id"], **more}
        assert served.post(RESPONSES, body).status_code == 200
        images = served.client.submitted[-1].images
        assert [i.tokens for i in images] == [9, 2, 2][: len(images)] and len(images) >= 2
    body = {"input": [user(part(RESPONSES, "x"))], "previous_response_id": first["id"]}
    assert "input[0].content[0].image_url" in served.post(RESPONSES, body).text
    monkeypatch.setattr(stored_items, "MOST_IMAGED", 650)
    second = post(served, RESPONSES, items, **more).json()
    assert [i.tokens for i in served.client.submitted[-1].images] == [9, 2]
    body = {"input": "more", "previous_response_id": second["id"]}
    assert served.post(RESPONSES, body).status_code == 200
    assert [i.tokens for i in served.client.submitted[-1].images] == [2]
    assert stored_items.NOT_KEPT in text_of(served.client.submitted[-1])


class Web:
    """A fetcher of one image, and of errors."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def fetch(self, url: str) -> bytes:
        self.asked.append(url)
        if not url.endswith(".png"):
            raise BadImage(f"nothing is at {url}")
        return png(96, 96)


@pytest.mark.parametrize("path", APIS)
def test_images_at_urls(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served, web = server(media_domains=("a.org",)), Web()
    served.service._fetcher = web  # type: ignore[assignment]
    there, gone = "https://a.org/x.png", "https://a.org/x"
    said = [user(part(path, gone)), SAID, user(part(path, there), part(path), part(path, there))]
    answer = post(served, path, said)
    assert answer.status_code == 200, answer.text
    request = served.client.submitted[-1]
    assert [i.tokens for i in request.images] == [9, 2, 9] and NOTE in text_of(request)
    assert sorted(web.asked) == [gone, there], "each once"
    if path == MESSAGES:
        count = served.post("/v1/messages/count_tokens", {"messages": said})
        assert count.json()["input_tokens"] == len(request.prompt)
        system = {"system": [part(path, "http://a.org/s.png")]}
        assert "cannot contain images" in post(served, path, said, **system).text
    error = refused(served, path, [user(part(path, gone))])
    assert f"url: nothing is at {gone}" in error["message"]
    monkeypatch.setattr(service_module, "MOST_FETCHED", 10)
    error = refused(served, path, [user(part(path, there))])
    assert "images at URLs are over" in error["message"]
    before = len(web.asked)
    refused(served, path, [user(part(path, "file:///x.png"))])
    error = refused(served, path, [user(part(path, f"https://a.org/{'x' * 9999}.png"))])
    assert "the URL has 10017 characters; at most 8192" in error["message"]
    assert len(web.asked) == before


def test_engines_without_vision_read_notes() -> None:
    served = ApiClient("Hello", template=ChatTemplate(TEMPLATE))
    for path, url in itertools.product(APIS, (uri(), "data:,", 7)):
        assert post(served, path, [user(part(path, url))]).status_code == 200
        request = served.client.submitted[-1]
        assert NOTE in text_of(request) and not request.images
    assert served.post("/v1/completions", {"prompt": WORDS[1]}).status_code == 200
    assert list(served.client.submitted[-1].prompt) == [vision().image_id], "as before"


def test_pillow_is_needed_only_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "spark_engine.runtime.server.prompts.prompt_images"
    monkeypatch.setitem(sys.modules, name, None)
    assert preparer.image_reader(None, ChatOptions())({}) is None
    assert preparer.image_reader(vision(), ChatOptions(max_images=0))({}) is None
    with pytest.raises(OptionError, match="--max-image-pixels 1023: .*; give 1024 or more"):
        preparer.image_reader(vision(), ChatOptions(max_image_pixels=1023))
    with pytest.raises(EngineError, match="not installed: .* install '?pillow"):
        preparer.image_reader(vision(), ChatOptions())


def _mutated(value: Any, draw: random.Random) -> Any:
    """A body's value with one place of it changed."""
    odd = (None, 7, True, "", "x", [], {}, ["x"], {"type": "text"}, {"type": "image"}, uri()[:-9])
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        if draw.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _mutated(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        i = draw.randrange(len(value))
        return [*value[:i], _mutated(value[i], draw), *value[i + 1 :]]
    if isinstance(value, str) and value.startswith("data:") and draw.random() < 0.7:
        data = bytearray(base64.b64decode(value.split(",")[1]))
        for _ in range(draw.randrange(1, 5)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        return uri(bytes(data[: draw.randrange(len(data) + 1)]))
    return draw.choice(odd)


@pytest.mark.parametrize("path", APIS)
def test_bad_parts_are_named_and_disturb_no_other_request(path: str) -> None:
    served, draw = server(), random.Random(path)
    bodies = [user(words(path, "a"), part(path)), *result(path, part(path), words(path, "b"))]
    codes = []
    for turn in range(150):
        messages = _mutated(bodies if turn % 2 else bodies[:1], draw)
        if not isinstance(messages, list):
            continue
        answer = post(served, path, messages)
        codes.append(answer.status_code)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            said = answer.json()["error"]["message"]
            assert "Traceback" not in said and ("messages" in said or "input" in said), said
        if turn % 25 == 0:
            assert len(ask(served, path, [user(part(path))]).images) == 1
    assert set(codes) == {200, 400} and json.dumps(codes)
