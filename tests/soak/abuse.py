"""Attacks on real servers of the embedded model, over the loopback: some twenty minutes.

    python -m tests.soak.abuse [WORD…]      all rows, or those with one of the words in their names

It prints a table, and exits with 1 where a row fails. Each row is an attack of
`tests/soak/attacks/`. While it lasts, an honest client in a separate process asks for short
streamed chats: its time to first token must stay below 2 s plus twice what it was before, and none
may be lost. The memory of all of the server's processes must return to within 100 MiB, and no
callback of the HTTP process's event loop may take 50 ms of CPU time.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.clients import tower_model
from tests.clients.run import VENVS
from tests.soak.attacks import bodies, connections, faults, front, grammars, images, starts, stored
from tests.soak.attacks.attack import READ_S, TEXT, Attack, Attacker
from tests.soak.attacks.processes import FRONT, How, Server, server
from tests.soak.attacks.trial import HEAD, KEPT_MB, Row, kept, trial

READ = ("--read-timeout", str(READ_S))
Opened = Callable[[ExitStack, Path], Server]
WARM = 12  # prompts that fill the prefix cache and the pools, as hours of use do


def plain(stack: ExitStack, folder: Path) -> Server:
    """As shipped, without keys."""
    return stack.enter_context(server(folder, How(READ)))


def few(stack: ExitStack, folder: Path) -> Server:
    """One that may open 64 files."""
    return stack.enter_context(server(folder, How(READ, shell="ulimit -n 64")))


def locked(stack: ExitStack, folder: Path) -> Server:
    """One with keys."""
    folder.mkdir()
    keys = folder / "keys.toml"
    keys.write_text(stored.KEYS)
    keys.chmod(0o600)
    how = How((*READ, "--api-keys", str(keys)), key=stored.HONEST)
    return stack.enter_context(server(folder, how))


def fronted(stack: ExitStack, folder: Path) -> Server:
    """A front before one with keys. Its memory and its loop are the front's."""
    behind = locked(stack, folder)
    how = How((behind.url,), key=stored.HONEST, module=FRONT)
    return stack.enter_context(server(folder / "front", how))


def few_encrypted(stack: ExitStack, folder: Path) -> Server:
    """One that speaks HTTPS and may open 64 files."""
    return encrypted(stack, folder, "ulimit -n 64")


def encrypted(stack: ExitStack, folder: Path, shell: str = "") -> Server:
    """One that speaks HTTPS, with a certificate that openssl makes."""
    folder.mkdir()
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "cert")]
    kind = ["-newkey", "rsa:2048", "-nodes", "-x509", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(["openssl", "req", *kind, *files], check=True, capture_output=True)
    options = ("--tls-cert", str(folder / "cert"), "--tls-key", str(folder / "key"))
    return stack.enter_context(server(folder, How((*READ, *options), tls=True, shell=shell)))


def seeing(stack: ExitStack, folder: Path) -> Server:
    """One with an engine that reads images."""
    how = How((*READ, str(tower_model.engine(VENVS / "tower"))))
    return stack.enter_context(server(folder, how))


def broken(stack: ExitStack, folder: Path) -> Server:
    """One with dumps on a file system of 1 MiB, or in files of 1 MiB at most."""
    folder.mkdir()
    shell = "" if faults.mount(folder / "dumps") else "ulimit -f 2048"
    if not shell:
        stack.callback(subprocess.run, ["umount", "-l", str(folder / "dumps")], check=False)
    how = How((*READ, *faults.OPTIONS), shell=shell, pause_s=0.5)
    return stack.enter_context(server(folder, how))


def copied(stack: ExitStack, folder: Path) -> Server:
    """One with a copy of the engine folder."""
    shutil.copytree(_embedded(), folder / "engine")
    how = How((*READ, str(folder / "engine")), pause_s=0.5)
    return stack.enter_context(server(folder, how))


GROUPS: tuple[tuple[Opened, tuple[Attack, ...]], ...] = (
    (plain, (*bodies.ATTACKS, *grammars.ATTACKS, *connections.ATTACKS)),
    (seeing, images.ATTACKS),
    (few, connections.FEW),
    (locked, stored.ATTACKS),
    (fronted, front.ATTACKS),
    (encrypted, connections.TLS),
    (few_encrypted, connections.FEW_TLS),
    (broken, faults.ATTACKS),
    *((copied, (attack,)) for attack in faults.LAST),
)
HOSTILE = "hostile engine folders"


def _embedded() -> Path:
    """The embedded model's engine folder, which the first server built."""
    code = (
        "import os\n"
        "from spark_engine.runtime.offline.embedded import cache_folder, embedded_engine\n"
        "print(embedded_engine(cache_folder(os.environ), lambda _: None))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    return Path(done.stdout.strip())


def warm(found: Server) -> None:
    """What any server takes in its first hours is no leak."""
    at = Attacker.of(found, found.how.key)
    for i in range(WARM):
        prompts = [f"{i} {j} " + "once upon a time " * 250 for j in range(3)]
        # choices too: steps of many sequences touch memory that was planned and not yet taken
        at.post(TEXT, {"prompt": prompts, "max_tokens": 16, "n": 5, "logprobs": 5})
        at.post(TEXT, {"prompt": "a", "max_tokens": 1, "guided_regex": f"[ab]{{{i + 1}}}"})
    if not found.how.module == FRONT:
        at.expect(at.statuses["200"] == 2 * WARM, f"warming: {at.statuses}")
    if at.wrong:
        raise SystemExit("; ".join(at.wrong))


def run(opened: Opened, attacks: Sequence[Attack], folder: Path) -> Iterator[Row]:
    """The rows of one server, and one for what it kept over all of them."""
    last = opened is copied
    with ExitStack() as stack:
        found = opened(stack, folder)
        if not last:
            warm(found)
        begin, fds, roles = found.held_mb(), found.descriptors(), found.memory_by_role()
        for attack in attacks:
            yield trial(found, attack, last)
        if last:
            return
        total = Row(f"= {opened.__name__}: from start to end", {}, 0, [], [], [])
        total.kept, now_roles = kept(found, begin), found.memory_by_role()
        total.statuses = {name: f"{roles[name]}-{mb}" for name, mb in now_roles.items()}
        now, code = found.descriptors(), found.stop()
        total.wrong += [f"{total.kept:.0f} MiB kept"] if total.kept >= KEPT_MB else []
        total.wrong += [f"{fds} descriptors became {now}"] if now > fds + 8 else []
        total.wrong += [f"SIGTERM: exit code {code}"] if code else []
        yield total


def hostile(folder: Path) -> Row:
    """Starts that must fail well: no other server runs."""
    with ExitStack() as stack:
        found = plain(stack, folder)
        attack = Attack(HOSTILE, lambda at: starts.hostile_folders(at, _embedded(), folder), "2")
        return trial(found, attack)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="abuse-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Runs all rows, or those with one of the words in their names."""
    words = sys.argv[1:]

    def asked(name: str) -> bool:
        return not words or any(word in name for word in words)

    print(HEAD, flush=True)
    well = []
    with _folder() as folder:
        for number, (opened, attacks) in enumerate(GROUPS):
            if chosen := [attack for attack in attacks if asked(attack.name)]:
                for row in run(opened, chosen, folder / f"{number}-{opened.__name__}"):
                    print(row.line(), flush=True)
                    well.append(not row.wrong)
        if asked(HOSTILE):
            row = hostile(folder / "hostile")
            print(row.line(), flush=True)
            well.append(not row.wrong)
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
