"""A hub of one repository on this machine: what huggingface_hub asks of it, and what went wrong."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git_id(data: bytes) -> str:
    """By which git names a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub(ThreadingHTTPServer):
    """Serves the files of `folder` as repository `name`.

    `cut` breaks off the first download of each file after so many bytes; `altered` changes a byte;
    `gated` asks for a token.
    """

    daemon_threads = True

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.name = folder, name
        self.cut: int | None = None
        self.altered: str | None = None
        self.gated = False
        self.ranges: list[tuple[str, int]] = []  # (file, first byte) of every download
        self.sent: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files(self) -> list[Path]:
        return sorted(p for p in self.folder.rglob("*") if p.is_file())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        asked = re.search(r"/revision/(.+)|/resolve/([^/]+)/", path)
        if asked and (asked[1] or asked[2]) not in (COMMIT, "main"):
            return self._refuse(404, "RevisionNotFound")
        if path.startswith(f"/api/models/{hub.name}"):
            if hub.gated:
                return self._refuse(403, "GatedRepo")
            if "/tree/" in path:
                return self._json([self._row(p, "path") for p in hub.files()])
            return self._json(
                {
                    "id": hub.name,
                    "sha": COMMIT,
                    "siblings": [self._row(p, "rfilename") for p in hub.files()],
                }
            )
        if path.startswith(f"/{hub.name}/resolve/"):
            return self._file(hub.folder / path.partition("/resolve/")[2].partition("/")[2], body)
        self._refuse(404, "RepoNotFound")

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _row(self, path: Path, name: str) -> dict[str, object]:
        data = path.read_bytes()
        place = path.relative_to(self.server.folder).as_posix()
        row: dict[str, object] = {name: place, "size": len(data), "type": "file"}
        row |= {"blobId": git_id(data), "oid": git_id(data)}
        if path.suffix == ".safetensors":
            digest = hashlib.sha256(data).hexdigest()
            row["lfs"] = {"sha256": digest, "oid": digest, "size": len(data), "pointerSize": 130}
        return row

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, path: Path, body: bool) -> None:
        hub, data = self.server, path.read_bytes()
        lfs = path.suffix == ".safetensors"
        tag = hashlib.sha256(data).hexdigest() if lfs else git_id(data)
        if hub.altered == path.name:
            data = bytes([data[0] ^ 1]) + data[1:]
        given = self.headers.get("Range", "bytes=0-").partition("=")[2].partition("-")
        first = int(given[0])
        last = min(int(given[2] or len(data)), len(data) - 1)
        part = data[first : last + 1]
        self.send_response(206 if self.headers.get("Range") else 200)
        self.send_header("ETag", f'"{tag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if not body:
            return
        hub.ranges.append((path.name, first))
        if hub.cut is not None and path.name not in hub.sent and len(part) > hub.cut:
            part = part[: hub.cut]
            self.close_connection = True
        hub.sent[path.name] = hub.sent.get(path.name, 0) + len(part)
        self.wfile.write(part)


@contextmanager
def serving(folder: Path, name: str) -> Iterator[Hub]:
    """A hub, for as long as the block runs."""
    hub = Hub(folder, name)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
