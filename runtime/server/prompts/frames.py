"""Messages over a stream socket: a header and blobs, each after its length.

The worker's side blocks. The event loop's side sends and receives TURN bytes a turn, so that 32 MiB
delay no other task, and never joins or splits a blob by copying it as a whole.
"""

import asyncio
import io
import socket
import struct
from collections.abc import Iterator, Sequence

from spark_engine.runtime.server.prompts.contract import Blobs

_COUNT, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")
TURN = 128 << 10  # bytes for one turn of the event loop
MOST_BLOBS = 4096


class Closed(Exception):
    """The other side has closed."""


def _head(header: bytes, lengths: Sequence[int]) -> bytes:
    sizes = (len(header), *lengths)
    return b"".join([_COUNT.pack(len(sizes)), *map(_LENGTH.pack, sizes), header])


def send(sock: socket.socket, header: bytes, blobs: Sequence[bytes]) -> None:
    """One message. Raises OSError where the other side has closed."""
    sock.sendall(_head(header, list(map(len, blobs))))
    for blob in blobs:
        sock.sendall(blob)


def receive(sock: socket.socket) -> tuple[bytes, list[bytes]]:
    """One message. Raises Closed."""
    count = _COUNT.unpack(_exactly(sock, _COUNT.size))[0]
    data = _exactly(sock, count * _LENGTH.size)
    header, *blobs = (_exactly(sock, size) for (size,) in _LENGTH.iter_unpack(data))
    return header, blobs


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = sock.recv_into(view[got:])
        if not count:
            raise Closed
        got += count
    return bytes(data)


async def send_async(sock: socket.socket, header: bytes, blobs: Sequence[Blobs]) -> None:
    """One message; each blob is given in parts. Raises OSError where the other side has closed."""
    loop = asyncio.get_running_loop()
    lengths = [sum(map(len, parts)) for parts in blobs]
    await loop.sock_sendall(sock, _head(header, lengths))
    for piece in _pieces(blobs):
        await loop.sock_sendall(sock, piece)
        await asyncio.sleep(0)


def _pieces(blobs: Sequence[Blobs]) -> Iterator[memoryview]:
    for parts in blobs:
        for part in parts:
            view = memoryview(part)
            yield from (view[at : at + TURN] for at in range(0, len(view), TURN))


async def receive_async(sock: socket.socket) -> tuple[bytes, list[bytes]]:
    """One message. Raises Closed, also for a malformed one, and OSError."""
    count = _COUNT.unpack(await _take(sock, _COUNT.size))[0]
    if not 0 < count <= MOST_BLOBS:
        raise Closed
    data = await _take(sock, count * _LENGTH.size)
    sizes = [size for (size,) in _LENGTH.iter_unpack(data)]
    header, *blobs = [await _take(sock, size) for size in sizes]
    return header, blobs


async def _take(sock: socket.socket, size: int) -> bytes:
    """`size` bytes as one object, without another copy."""
    loop, taken = asyncio.get_running_loop(), io.BytesIO()
    while (left := size - taken.tell()) > 0:
        part = await loop.sock_recv(sock, min(left, TURN))
        if not part:
            raise Closed
        taken.write(part)
        if left > TURN:
            await asyncio.sleep(0)
    return taken.getvalue()
