"""How a server reads conversations. Imports no library: every mode of the command line reads it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_engine.runtime.text.reply_formats import AUTO


@dataclass(frozen=True)
class ChatOptions:
    """How a server reads conversations."""

    reasoning: str = AUTO  # the format of thoughts, a row of `reply_formats` or "auto"
    tools: str = AUTO  # the format of calls, likewise
    think_budget: int | None = None  # the default maximum of thought tokens; None: no limit
    reasoning_effort: str | None = None  # the default effort; None: the template's
    template_kwargs: Mapping[str, Any] | None = None  # the default options of the template
    max_images: int = 32  # of a request; 0: no image is read
    max_image_pixels: int | None = None  # larger ones are made smaller; None: the engine's maximum
    media_domains: tuple[str, ...] = ()  # from which images are fetched; empty: only data URIs
