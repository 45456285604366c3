"""The shared part of reading bodies: checks, prompts, tokens, choices.

Pure: no process, no engine, no HTTP. The functions for each API are in `read_bodies.py`. The caller
limits its time and memory.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from spark_engine.errors import EngineError, OptionError, RequestError
from spark_engine.hints import extra
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.engine.request import Request, SamplingParams, capacity
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.api.common import (
    MAX_CHOICES,
    Body,
    Defaults,
    capacity_after,
    check,
    check_together,
    sampling,
    scored,
)
from spark_engine.runtime.server.api.fields import BadField, short, too_long, unknown_model
from spark_engine.runtime.server.prompts.allowed_token_ids import only_these_ids
from spark_engine.runtime.server.prompts.bad_words import bar
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.server.prompts.contract import (
    PLACE,
    Asked,
    Bounds,
    FormAsked,
    FormName,
    Prepared,
    PreparedPrompt,
    Seen,
    Setup,
    encode,
)
from spark_engine.runtime.server.prompts.conversation import ChatReader, Reading
from spark_engine.runtime.server.prompts.limits import (
    MOST_CHARACTERS,
    MOST_SHOWN,
    MOST_TEXT,
    MOST_TOKENS,
    MOST_TYPES,
)
from spark_engine.runtime.server.prompts.tokenising import encode_tail, encode_within
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.structured.forms import form_of
from spark_engine.runtime.structured.tool_choice import AUTO, NONE, ToolChoice
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.tokenizer import Tokenizer, need
from spark_engine.runtime.text.tool_schema import Types, parameter_types
from spark_engine.runtime.text.turns import Turns
from spark_engine.vision import Image, VisionInfo

if TYPE_CHECKING:
    from spark_engine.runtime.server.prompts.prompt_images import PromptImages

_FIELDS = StructuredFields.__struct_fields__
Bind = Callable[[ConstraintSpec | None], ConstraintSpec | None]


class Forms(ChatReader):
    """A reader that records requested forms under names and compiles none: compiling is another
    job."""

    def __init__(
        self, template: ChatTemplate | None, tokenizer: Tokenizer | None, options: ChatOptions
    ) -> None:
        super().__init__(template, tokenizer, options)
        self._asked: dict[FormName, bytes] = {}

    def form(
        self,
        body: StructuredFields,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        choice: str | Mapping[str, Any] | None = None,
        parallel: bool = True,
    ) -> ConstraintSpec | None:
        """The constraint of a body's form and tools; its grammar is the form's name."""
        chosen = ToolChoice.of(tools, choice)
        strict = chosen.mode == AUTO and any(tool.strict for tool in chosen.tools)
        form = form_of(body)
        if form is None and not strict and chosen.mode in (AUTO, NONE):
            return None
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer, which structured outputs need")
        fields = StructuredFields(**{name: getattr(body, name) for name in _FIELDS})
        asked = FormAsked(fields, [dict(tool) for tool in tools], choice, thinking, parallel)
        data = encode(asked)
        name = blake2b(data, digest_size=16).hexdigest()
        self._asked[FormName(name, "tools" if form is None else form.place)] = data
        number = None
        if thinking and self.formats.thoughts is not None:
            number = self._tokenizer.id_of(self.formats.thoughts.end)
        return ConstraintSpec(grammar=name, end_of_thought=-1 if number is None else number)

    def take(self) -> dict[FormName, bytes]:
        """Returns and removes the forms, by their names, each a FormAsked."""
        asked, self._asked = self._asked, {}
        return asked


class Preparer:
    """Reads bodies for one engine, one at a time. Keeps no state of a body."""

    def __init__(
        self, setup: Setup, tokenizer: Tokenizer | None, template: ChatTemplate | None
    ) -> None:
        """Raises OptionError for an unknown format of replies, or a budget of thoughts that cannot
        be enforced, and EngineError where images cannot be read."""
        self.info, self._setup = setup.info, setup
        self.fetched: Mapping[str, bytes | str] = {}  # images of the body, or errors, by URL
        self.seen: Sequence[Seen] = ()
        self._images = image_reader(setup.info.vision, setup.chat)
        self.tokenizer = tokenizer = reserve(tokenizer, setup.info.vision)
        self.reader = Forms(template, tokenizer, setup.chat)
        self._turns = Turns(tokenizer)
        self._defaults = Defaults.of(setup.info.generation)

    @property
    def max_model_len(self) -> int:
        return capacity(self.info.limits)

    def images(self) -> "PromptImages | None":
        """For the images of a body; None where none are read."""
        return self._images(self.fetched, self.seen)

    def converse(
        self, chat: ChatRequest, asked: Asked | None = None, images: "PromptImages | None" = None
    ) -> tuple[Prepared, list[bytes]]:
        """An accepted conversation, and the blobs. `asked` has the API's fields; the messages have
        the marks of `images`. Raises RequestError."""
        reading = self.read(chat, images)
        ids, placed = self.tokens_of(reading.text, images, chat.truncate_prompt_tokens)
        asked = self.asked(chat, asked or Asked())
        if placed and asked.prompt_scored:
            words = "prompt_logprobs are not computed for a prompt with images: leave it out"
            raise BadField(words, "prompt_logprobs")
        asked.conversation = True
        asked.shown, asked.thinking, asked.fresh = reading.shown, reading.thinking, reading.fresh
        asked.parallel = chat.parallel_tool_calls is not False
        asked.types = _types(chat)
        found = self.prepared(chat, [ids], [(reading.form, reading.bind)], asked, images=placed)
        if images is not None:
            images.leave_out(found[0].prompts[0], found[1])
        return found

    def read(self, chat: ChatRequest, images: "PromptImages | None" = None) -> Reading:
        """The text of a conversation's prompt, and the constraint. Raises RequestError."""
        need(self.tokenizer)
        return self.reader.read(chat, None if images is None else images.marks)

    def tokens_of(
        self, text: str, images: "PromptImages | None", last: int | None = None
    ) -> tuple[list[int], tuple[Image, ...]]:
        """The ids of a conversation's prompt, or as in `ids_of` its `last` ones, and its images.
        Raises BadField."""
        if images is None or images.marks is None:
            return self.ids_of(text, last), ()
        ids, placed = images.tokens(text, need(self.tokenizer), self.max_model_len)
        if last is not None and 0 < last < len(ids):
            words = f"truncate_prompt_tokens is {last}, and a prompt of {len(ids)} tokens that has"
            raise BadField(f"{words} images is not cut: leave it out", "truncate_prompt_tokens")
        return ids, placed

    def check(self, body: Body, count: int) -> None:
        """Checks a body with `count` prompts before they are read. Raises RequestError."""
        check(body)
        self._check_model(body.model)
        n = body.n or 1
        most = min(MAX_CHOICES, self._setup.most_answers)
        if count * n > most:
            words = f"{count} prompts with n = {n} are {count * n} answers; at most {most}"
            raise BadField(f"{words} are allowed at once", "n" if n > 1 else "prompt")
        if body.priority and not self._setup.allow_priority:
            words = f"priority is {body.priority}; this server answers in order of arrival"
            raise BadField(f"{words} (spark-run --allow-priority lets clients choose)", "priority")

    def accept(self, chat: ChatRequest) -> ChatRequest:
        """The same for a conversation, which is returned. Raises RequestError."""
        self.check(chat, 1)
        most = self.max_model_len
        if len(chat.messages) > most:  # none is shorter than a token
            raise too_long(f"{len(chat.messages)} messages", most, "messages")
        return chat

    def prepared(
        self,
        body: Body,
        prompts: Sequence[Sequence[int]],
        forms: Sequence[tuple[ConstraintSpec | None, Bind]],
        asked: Asked,
        echoes: Sequence[str] = (),
        images: tuple[Image, ...] = (),
    ) -> tuple[Prepared, list[bytes]]:
        """The message and blobs of a body with these prompts (ids) and forms of answers; the n
        choices of a prompt share both. `images`: of the only prompt. Raises RequestError."""
        self._check_sizes(body, sum(map(len, prompts)), sum(map(len, echoes)))
        rows, blobs, params = [], [], None
        for i, (ids, (form, bind)) in enumerate(zip(prompts, forms, strict=True)):
            params, row, blob = self._prompt(body, ids, form, bind, images)
            row.echo = echoes[i] if echoes else ""
            rows.append(row)
            blobs.append(blob)
        assert params is not None
        wanted = self.reader.take()
        blobs += [*wanted.values(), *(image.pixels for image in images)]
        return Prepared(rows, params, body.priority or 0, asked, list(wanted)), blobs

    def forget(self) -> None:
        """Drops the state of a body that was not read to its end."""
        self.reader.take()
        self.fetched, self.seen = {}, ()

    def asked(self, body: Body, asked: Asked) -> Asked:
        asked.n, asked.stream = body.n or 1, bool(body.stream)
        asked.stream_options = body.stream_options
        asked.return_token_ids = bool(body.return_token_ids)
        asked.logprobs, asked.prompt_logprobs = body.wanted_logprobs(), body.prompt_logprobs
        asked.cache_salt = body.cache_salt
        asked.words = not body.return_tokens_as_token_ids
        asked.detokenize = body.detokenize is not False
        asked.skip_special = body.skip_special_tokens is not False
        asked.prompt_scored = body.scores_prompt()
        asked.keep_stop = bool(body.include_stop_str_in_output)
        return asked

    def ids_of(self, prompt: str | list[int], last: int | None = None) -> list[int]:
        """A prompt's token ids, or its `last` ones; NO_LIMIT: as many as fit with one new token.
        Raises BadField for one that cannot fit."""
        most = self.max_model_len
        if last is None:
            if isinstance(prompt, str):
                return encode_within(need(self.tokenizer), prompt, most)
            capacity_after(prompt, self.info.limits)
            return prompt
        if last >= most:
            words = f"truncate_prompt_tokens is {short(last)}; this engine holds {most} tokens"
            raise BadField(f"{words}, one of them new", "truncate_prompt_tokens")
        wanted = last if last > 0 else most - 1
        if isinstance(prompt, str):
            return encode_tail(need(self.tokenizer), prompt[-MOST_CHARACTERS:], wanted)
        return prompt[-wanted:]

    def encode(self, text: str, field: str, images: "PromptImages | None" = None) -> list[int]:
        """All token ids of a text of `field`, with those of `images`. Raises BadField for one too
        long."""
        if len(text) > MOST_CHARACTERS:
            words = f"the text has {len(text)} characters; at most {MOST_CHARACTERS} are tokenised"
            raise BadField(words, field)
        if images is not None:
            return images.tokens(text, need(self.tokenizer), MOST_CHARACTERS + MOST_TOKENS)[0]
        return need(self.tokenizer).encode(text)

    def _prompt(
        self,
        body: Body,
        ids: Sequence[int],
        form: ConstraintSpec | None,
        bind: Bind,
        images: tuple[Image, ...],
    ) -> tuple[SamplingParams, PreparedPrompt, bytes]:
        eos, limits = self.info.eos_token_ids, self.info.limits
        check_together(ids, body.n or 1, sum(len(image.pixels) for image in images))
        prompt = ids if isinstance(ids, list) else list(ids)
        params = sampling(body, self._defaults, capacity_after(prompt, limits))
        request = Request(tuple(prompt), params, images=images)
        request.check(limits, eos, self.info.vision)

        def bound(form: ConstraintSpec | None) -> ConstraintSpec | None:
            found = bind(form)
            if body.allowed_token_ids is not None:
                known, most = len(need(self.tokenizer)), params.max_tokens or 0
                found = only_these_ids(body.allowed_token_ids, known, eos, most, found)
            if body.bad_words:
                found = bar(body.bad_words, need(self.tokenizer), found)
            return found

        name = "" if form is None else form.grammar
        bounds = Bounds(name, bound(form), bound(None) if name else None)
        if bounds.bound is not None and name:
            bounds = replace(bounds, bound=replace(bounds.bound, grammar=PLACE))
        marks, forced = self._turns.marks(prompt), 0
        if body.scores_prompt():
            # of a prompt of one token nothing is scored, and the engine must generate something
            forced, marks = len(prompt) - 1 or int(body.max_tokens == 0), ()
            params = scored(body, params, forced)
        row = PreparedPrompt(
            forced, marks, params.max_tokens or 0, params.logprobs, params.seed or 0, bounds
        )
        row.images = tuple(dataclasses.replace(image, pixels=b"") for image in images)
        return params, row, request.packed

    def _check_sizes(self, body: Body, tokens: int, echoed: int) -> None:
        """Bounds the work of the event loop: copying and writing all prompts, for each choice."""
        n = body.n or 1
        shown = body.return_token_ids or body.scores_prompt()
        most = MOST_SHOWN if shown else MOST_TOKENS
        if tokens * n > max(most, self.max_model_len):
            words = f"{tokens} prompt tokens with n = {n} are {tokens * n}; at most {most} are"
            how = " where the answer repeats them" if shown else ""
            raise BadField(f"{words} allowed at once{how}: send several requests", "prompt")
        if echoed * n > max(MOST_SHOWN * 8, self.max_model_len * 8):
            words = f"echo would repeat {echoed * n} characters; at most {MOST_SHOWN * 8} are"
            raise BadField(f"{words} allowed at once: send several requests", "echo")

    def _check_model(self, name: str | None) -> None:
        names = self._setup.names
        if name is not None and name not in names:
            raise unknown_model(name, names)


def reserve(tokenizer: Tokenizer | None, info: VisionInfo | None) -> Tokenizer | None:
    """The tokenizer of an engine: no text becomes the tokens of images."""
    if tokenizer is None or info is None:
        return tokenizer
    return tokenizer.without((info.image_id, info.start_id, info.end_id))


def image_reader(
    info: VisionInfo | None, options: ChatOptions
) -> "Callable[[Mapping[str, bytes | str], Sequence[Seen]], PromptImages | None]":
    """Makes what reads the images of one body, some of them fetched, some seen before; None where
    no image is read. Raises EngineError, and OptionError for a limit that no image fits."""
    if info is None or not options.max_images:
        return lambda *_: None
    if (most := options.max_image_pixels) is not None and most < info.unit**2:
        words = f"an image has {info.unit} x {info.unit} pixels at least"
        raise OptionError(f"--max-image-pixels {most}: {words}; give {info.unit**2} or more")
    try:
        # imported here: text needs no Pillow, and workers are forked with it
        from spark_engine.runtime.server.prompts.prompt_images import PromptImages
    except ModuleNotFoundError as error:
        words = f"this engine reads images, and {error.name} is not installed"
        raise EngineError(f"{words}: {extra('vision')}, or --max-images 0") from None
    return lambda *given: PromptImages(info, options, *given)


def check_texts(texts: Sequence[str]) -> None:
    """Raises BadField where the prompts of a body are too long together."""
    size = sum(map(len, texts))
    if size > MOST_TEXT and len(texts) > 1:  # one alone is held to the engine's length
        words = f"the prompts have {size} characters together; at most {MOST_TEXT} are tokenised"
        raise BadField(f"{words} for one request: send several", "prompt")


def _types(chat: ChatRequest) -> Types | None:
    """The types of the tools' parameters. Raises BadField for too many."""
    if not chat.offered:
        return None
    found = parameter_types(chat.offered)
    size = len(msgspec.msgpack.encode(found))
    if size > MOST_TYPES:
        words = f"the names and types of the tools' parameters are {size} bytes"
        raise BadField(f"{words}; at most {MOST_TYPES} are supported", "tools")
    return found


def json_of(value: object) -> list[bytes]:
    return [msgspec.json.encode(value)]
