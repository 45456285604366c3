"""The page's files as answers: media types, tags, and the content security policy.

Knows the files next to it and HTTP's headers. Knows nothing of what the page shows: the scripts in
`files/` use the same endpoints as any client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath

from fastapi import Response
from starlette.exceptions import HTTPException

INDEX = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts and styles are loaded from the bundle only, and no script can be made from text: a model's
# text is only shown.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # checked by its tag each time: a new version is used at once
}


@dataclass(frozen=True)
class PageFile:
    """One file: its bytes, media type, and a tag that changes with the bytes."""

    data: bytes
    kind: str
    tag: str

    def response(self, known: str = "") -> Response:
        """The file, or 304 where `known`, the request's If-None-Match, has its tag."""
        headers = {**HEADERS, "ETag": self.tag}
        tags = (tag.strip().removeprefix("W/") for tag in known.split(","))
        if self.tag in tags:
            return Response(status_code=304, headers=headers)
        return Response(self.data, media_type=self.kind, headers=headers)


@dataclass(frozen=True)
class Bundle:
    """Every file of the page by its name."""

    files: Mapping[str, PageFile]

    def response(self, name: str, known: str = "") -> Response:
        """One file, or 304 as of `PageFile.response`. Raises HTTPException 404."""
        if name not in self.files:
            raise HTTPException(404, f"the page has no file {name!r}")
        return self.files[name].response(known)


def read_bundle() -> Bundle:
    """The files next to this module."""
    found = {}
    for entry in files(__package__).joinpath("files").iterdir():
        kind = KINDS.get(PurePosixPath(entry.name).suffix)
        if kind is not None:
            data = entry.read_bytes()
            tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
            found[entry.name] = PageFile(data, kind, tag)
    return Bundle(found)
