"""The text of a message's parts, in any API's format.

Knows the part types of OpenAI's and Anthropic's APIs. A text model cannot read images, audio or
files, and a client sends its whole history with every request. So nothing here raises: an
unreadable part becomes a short note at its position, and the model can report that it does not see
it. The images that a model does see were replaced before (`image_parts`).
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

THOUGHTS = ("thinking", "reasoning", "reasoning_text", "summary_text", "redacted_thinking")
_TEXTS = ("text", "input_text", "output_text")
_IMAGES = ("image", "image_url", "input_image", "image_file", "computer_screenshot", "screenshot")
_FILES = ("file", "input_file", "document", "container_upload", "file_id", "attachment")
_SOUNDS = ("audio", "input_audio", "audio_url", "output_audio")
_VIDEOS = ("video", "video_url", "input_video")
# of a file, or a search's result; in order of preference
_NAMES = ("filename", "file_name", "title", "name", "file_id", "error_code")
_DEPTH = 4  # nesting of parts
_SHOWN = 80  # characters of a client's text in a note


def text_of(content: Any, joint: str = "") -> str:
    """The text of a content: a string, a list of parts, or one part. `joint` separates parts of
    text; a note starts on a new line."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return _joined(content, joint, _DEPTH)
    found = None
    if is_content(content):
        found = _part(content, _DEPTH)  # otherwise a tool's own object
    return to_json(content) if found is None else found[0]


def thought_of(part: Mapping[str, Any]) -> str:
    """The text of a part with a type in THOUGHTS; empty if it is encrypted."""
    found = [part.get(name) for name in ("thinking", "text")]
    return next((text for text in found if isinstance(text, str)), "")


def kind_of(part: Any) -> str:
    """The type of a part; empty without one."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else ""


def is_content(value: Any) -> bool:
    """True for one part that is a whole content; other objects are a tool's JSON."""
    return isinstance(value, Mapping) and bool({"type", "text"} & set(value))


def has_text(part: Mapping[str, Any]) -> bool:
    """True if a part is read as text, whatever else it has."""
    kind, text = kind_of(part), part.get("text")
    return kind in THOUGHTS or isinstance(text, str) or (text is None and kind in _TEXTS)


def is_image(part: Mapping[str, Any]) -> bool:
    return kind_of(part) in _IMAGES or "image_url" in part


def is_video(part: Mapping[str, Any]) -> bool:
    return kind_of(part) in _VIDEOS


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def short_json(value: Any, most: int = 2 * _SHOWN) -> str:
    """The same, truncated to this many characters."""
    text = to_json(value)
    return text if len(text) <= most else f"{text[:most]}…"


def short(value: Any) -> str:
    """A value for an error."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _joined(parts: Iterable[Any], joint: str, depth: int) -> str:
    texts, on_line = list[str](), True  # at the start of a line
    for part in parts:
        more, other = _part(part, depth) or (_unknown(part), True)
        if not more:
            continue
        if texts:
            texts.append("\n" if other or not on_line else joint)
        texts.append(more)
        on_line = not other
    return "".join(texts)


def _part(part: Any, depth: int) -> tuple[str, bool] | None:
    """(text, whether it is a note) of one part; None for an unknown type."""
    if part is None or isinstance(part, str):
        return part or "", False
    if not isinstance(part, Mapping):
        return to_json(part), False
    kind = kind_of(part)
    if kind in THOUGHTS:
        return thought_of(part), False
    text = part.get("refusal") if kind == "refusal" else None
    text = part.get("text") if text is None else text
    if isinstance(text, str) or (text is None and kind in _TEXTS):
        return text or "", False
    if is_image(part):
        return "[an image that this model cannot see]", True
    if kind in _SOUNDS:
        return "[a sound that this model cannot hear]", True
    if is_video(part):
        return "[a video that this model cannot see]", True
    if (inside := _inside(part, depth)) is not None:
        return inside, True
    if kind in _FILES:
        return f"[a file that this model cannot read{_named(part)}]", True
    if kind == "tool_reference":
        return f"[the tool {_short(part.get('tool_name'))}]", True
    if kind.endswith("_use"):
        return f"[a call of {_short(part.get('name'))}: {short_json(part.get('input'))}]", True
    return None


def _unknown(part: Mapping[str, Any]) -> str:
    words = f"of type {_short(kind)} " if (kind := kind_of(part)) else ""
    return f"[content {words}that this model cannot read{_named(part)}]"


def _inside(part: Mapping[str, Any], depth: int) -> str | None:
    """The text inside a part: a document, a search result, or a program's output. None if there is
    none."""
    source, inner = part.get("source"), part.get("content")
    if isinstance(source, Mapping):
        kind = source.get("type")
        inner = source.get({"text": "data", "content": "content"}.get(str(kind), ""))
    found = [part[key] for key in ("stdout", "stderr") if isinstance(part.get(key), str)]
    if depth and isinstance(inner, str | list | Mapping):
        found.append(_joined(inner if isinstance(inner, list) else [inner], "\n", depth - 1))
    if kind_of(part).endswith("_result"):
        found.insert(0, _heading(part))
    if not found:
        return None
    return "\n".join(text for text in found if text)


def _heading(part: Mapping[str, Any]) -> str:
    found = (part.get(key) for key in ("title", "source", "url"))
    return " ".join(value for value in found if isinstance(value, str) and value)


def _named(part: Mapping[str, Any]) -> str:
    inner = part.get("file") if isinstance(part.get("file"), Mapping) else {}
    for place in (part, inner):
        for key in _NAMES:
            if isinstance(place, Mapping) and isinstance(name := place.get(key), str) and name:
                return f": {_short(name)}"
    return ""


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
