"""The page's files as answers: media types, tags, and the content security policy.

Knows the files next to it and HTTP's headers. Knows nothing of what the page shows: the scripts in
`files/` use the same endpoints as any client.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from fastapi import Response

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
        "img-src 'self' blob:",  # images that the user attached
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


def read_bundle() -> Mapping[str, PageFile]:
    """The files next to this module, by path."""
    return dict(_read(files(__package__).joinpath("files"), ""))


def _read(folder: Traversable, path: str) -> Iterator[tuple[str, PageFile]]:
    for entry in folder.iterdir():
        kind = KINDS.get(PurePosixPath(entry.name).suffix)
        if entry.is_dir():
            yield from _read(entry, f"{path}{entry.name}/")
        elif kind is not None:
            data = entry.read_bytes()
            tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
            yield path + entry.name, PageFile(data, kind, tag)
