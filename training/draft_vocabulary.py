"""Counts the list of ids that draft heads draft from (models/draft_vocabulary.json).

  python -m training.draft_vocabulary TOKENIZER.json PACKAGES --out models/draft_vocabulary.json
  python -m training.draft_vocabulary TOKENIZER.json PACKAGES --ids mine.txt     for --draft-vocab

TOKENIZER.json is that of a checkpoint with the vocabulary. PACKAGES has a folder for each Debian
package that PATTERNS names, with its files (`apt-get download NAME`, `dpkg-deb -x FILE
PACKAGES/NAME`; of linux-source and openjdk-source also their archive), and those of npm (`npm pack
NAME`, PACKAGES/npm-NAME) and PyPI (jieba).

Each group of texts has its share of the text that is expected; an id's weight is the sum of its
frequencies in the groups by their shares. A part of it is by the id alone: a BPE vocabulary is in
the order of its merges, and so about in that of the frequencies in the text that it was made of,
which was larger than ours. The ids with the most weight are listed, and all bytes and special
tokens. Files that were not counted give the coverage, the share of a group's tokens that the list
has: others of the same packages, and other stories of a game.
"""

import argparse
import gzip
import hashlib
import html
import json
import re
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from spark_engine.models.draft_vocabulary import digest

LISTED = 65_536  # ids
BY_ID, FLAT = 0.15, 1000  # the part by the id alone: as 1 / (id + FLAT)
CHUNK = 1 << 14  # characters that are tokenized at once
HELD_OUT, HELD_PROSE = 8, 4  # one file in so many is not counted
PROSE = "wesnoth-1.16-*/**/{0}/LC_MESSAGES/*.mo"  # stories and dialogues of a game
PROSE_SHARE, PROSE_MB = 0.5, 2  # of a language's text
SEEN = 300  # a word of jieba's list counts once for so many times that it was seen

# Languages: (share, MB at most, names in paths), those of LibreOffice first.
LANGUAGES: Mapping[str, tuple[float, float, tuple[str, ...]]] = {
    "English": (0.27, 16, ("en-us", "en", "en-US", "C", "min")),
    "Chinese, simplified": (0.14, 6, ("zh-cn", "zh", "zh-CN", "zh_CN")),
    "Chinese, traditional": (0.02, 3, ("zh-tw", "zh-TW", "zh_TW")),
    "Japanese": (0.035, 4, ("ja", "ja-JP")),
    "Korean": (0.03, 4, ("ko", "ko-KR")),
    "German": (0.035, 4, ("de", "de-DE")),
    "French": (0.035, 4, ("fr", "fr-FR")),
    "Spanish": (0.035, 4, ("es", "es-ES")),
    "Portuguese": (0.025, 4, ("pt-br", "br", "pt", "pt-BR", "pt_BR")),
    "Italian": (0.02, 4, ("it", "it-IT")),
    "Russian": (0.03, 4, ("ru", "ru-RU")),
    "Polish": (0.012, 3, ("pl", "pl-PL")),
    "Dutch": (0.012, 3, ("nl", "nl-NL")),
    "Turkish": (0.01, 3, ("tr", "tr-TR")),
    "Vietnamese": (0.01, 3, ("vi", "vi-VN")),
    "Indonesian": (0.01, 3, ("id", "id-ID")),
    "Ukrainian": (0.008, 3, ("uk",)),
    "Czech": (0.008, 3, ("cs", "cs-CZ")),
    "Swedish": (0.008, 3, ("sv", "sv-SE")),
    "Danish": (0.004, 2, ("da", "da-DK")),
    "Finnish": (0.004, 2, ("fi",)),
    "Hungarian": (0.004, 2, ("hu",)),
    "Greek": (0.004, 2, ("el", "el-GR")),
    "Hindi": (0.006, 2, ("hi",)),
}
PATTERNS = (  # of packages, for each of a language's names
    "libreoffice-help-{0}/usr/share/libreoffice/help/*/text/**/*.html",
    "manpages-{0}/usr/share/man/*/man*/*.gz",
    "gimp-help-{0}/**/*.html",
    "gnome-user-docs/usr/share/help/{0}/**/*.page",
    "debian-handbook/**/html/{0}/*.html",
    "debian-reference-{0}/**/*.html",
    "debian-faq-{0}/**/*.html",
    "installation-guide-amd64/**/{0}/*.html",
    "stellarium-data/**/description.{0}.utf8",
    "wordpress-l10n/**/languages/*{0}.mo",
    "fortunes-{0}/usr/share/games/fortunes/**/*",
)
MORE_PROSE = {
    "Chinese, simplified": ("jieba/**/dict.txt",),
    "English": ("wesnoth-1.16-*/**/*.cfg",),
}
MORE = {"English": ("anarchism/**/*.html", "linux-doc-6.1/**/*.rst*", "rust-src/**/*.md")}
CODE: Mapping[str, tuple[float, float, tuple[str, ...]]] = {  # (share, MB at most, patterns)
    "Python": (
        0.08,
        10,
        ("libpython3.11-stdlib/**/*.py", "python3-django/**/*.py", "ansible/**/*.py"),
    ),
    "C": (0.03, 8, ("linux-source-6.1/**/*.c", "golang-1.19-src/**/*.c")),
    "C++": (0.04, 8, ("libeigen3-dev/**/*.h", "libboost1.74-dev/**/*.hpp", "rust-src/**/*.cpp")),
    "JavaScript": (0.04, 8, ("npm-three*/**/*.js", "npm-svelte*/**/*.js", "npm-lodash*/**/*.js")),
    "TypeScript": (0.03, 8, ("npm-rxjs*/**/src/**/*.ts", "npm-types-node*/**/*.ts")),
    "Java": (0.02, 8, ("openjdk-17-source/src/**/*.java",)),
    "Go": (0.02, 8, ("golang-1.19-src/**/*.go",)),
    "Rust": (0.02, 8, ("rust-src/**/*.rs",)),
    "Ruby, PHP": (0.01, 4, ("ruby-*/**/*.rb", "php-*/**/*.php")),
    "shell": (0.01, 2, ("bash-completion/**/completions/*", "golang-1.19-src/**/*.bash")),
    "HTML, CSS": (
        0.02,
        6,
        ("npm-bootstrap*/**/*.scss", "python3-django/**/*.html", "anarchism/**/*.html"),
    ),
    "YAML, JSON, Markdown": (
        0.015,
        6,
        tuple(f"ansible/**/*.{end}" for end in ("yml", "json", "md")),
    ),
}


@dataclass(frozen=True)
class Group:
    """Texts of one kind: its share, the most MB that are read, its files' patterns, and those of
    prose."""

    share: float
    most: float
    patterns: tuple[str, ...]
    prose: tuple[str, ...] = ()


def groups() -> dict[str, Group]:
    found = {}
    for name, (share, most, names) in LANGUAGES.items():
        own = [p.format(code) for code in names for p in PATTERNS] + [*MORE.get(name, ())]
        prose = [PROSE.format(code) for code in names] + [*MORE_PROSE.get(name, ())]
        found[name] = Group(share, most, tuple(own), tuple(prose))
    return found | {name: Group(*row) for name, row in CODE.items()}


def text_of(path: Path, code: bool) -> str:
    """A file's text, without markup unless it is `code`; "" if it is not UTF-8."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".mo":
        return "\n".join(translations(data))
    if path.name == "dict.txt":  # a word, how often it was seen, its kind
        rows = (line.split() for line in data.decode().splitlines())
        return "\n".join(word for word, seen, *_ in rows for _ in range(int(seen) // SEEN))
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return ""
    if code:
        return text
    if path.suffix == ".cfg":  # of the game: its texts, which others are translations of
        return "\n".join(re.findall(r'_ *"([^"]*)"', text))
    if path.suffix in (".html", ".page"):
        text = re.sub(r"(?s)<(script|style|head)\b.*?</\1>|<!--.*?-->", "", text)
        return re.sub(r"\s*\n\s*", "\n", html.unescape(re.sub(r"<[^>]*>", "", text)))
    if "/man/" in path.as_posix():
        text = re.sub(r"(?m)^[.'](\\\"|[A-Za-z]+).*?( |$)|\\f[A-Z]|\\f\(..|\\f\[.*?\]", "", text)
        return text.replace("\\-", "-").replace("\\&", "")
    return text


def translations(data: bytes) -> Iterator[str]:
    """The translated messages of a .mo file."""
    if data[:4] != b"\xde\x12\x04\x95":
        return
    count, at = (int.from_bytes(data[i : i + 4], "little") for i in (8, 16))
    for size, start in np.frombuffer(data, "<u4", 2 * count, at).reshape(count, 2)[1:].tolist():
        yield data[start : start + size].decode(errors="ignore").replace("\0", "\n")


def read(
    root: Path, patterns: tuple[str, ...], most: float, held: bool, every: int, code: bool = False
) -> Iterator[str]:
    """Texts of up to `most` bytes, of each pattern as much as of the others; of one file in `every`
    that is `held` out, by its name, or of the others."""
    found = [sorted(p for p in root.glob(pattern) if p.is_file()) for pattern in patterns]
    found = sorted((paths for paths in found if paths), key=len)
    for i, paths in enumerate(found):
        left = most / (len(found) - i)
        for path in sorted(paths, key=lambda p: _draw(p.relative_to(root))):
            if held != (_draw(Path(path.name)) % every == 0):
                continue
            if left <= 0:
                break
            text = text_of(path, code)[: int(left)]
            size = len(text.encode())
            left, most = left - size, most - size
            yield text


def _draw(path: Path) -> int:
    return int.from_bytes(hashlib.blake2b(path.as_posix().encode(), digest_size=8).digest(), "big")


def count(tokenizer: Tokenizer, texts: Iterator[str], rows: int) -> np.ndarray:
    """How often each id occurs."""
    counts = np.zeros(rows, np.int64)
    for text in texts:
        pieces = [text[i : i + CHUNK] for i in range(0, len(text), CHUNK)]
        for one in tokenizer.encode_batch(pieces, add_special_tokens=False):
            np.add.at(counts, one.ids, 1)
    return counts


Counts = Mapping[str, np.ndarray]


def weights(counted: Counts, prose: Counts, tokens: int, by_id: float = BY_ID) -> np.ndarray:
    """Of each id that the BPE has."""
    total = 1 / (np.arange(tokens) + FLAT)
    total *= by_id / total.sum()
    shares = sum(one.share for one in groups().values())
    for name, counts in counted.items():
        part = (1 - by_id) * groups()[name].share / shares
        own_share = PROSE_SHARE if prose[name].sum() else 0
        for share, own in ((1 - own_share, counts), (own_share, prose[name])):
            total += part * share * own[:tokens] / max(1, own.sum())
    return total


def counts_of(root: Path, tokenizer: Tokenizer, rows: int) -> dict[str, dict[str, np.ndarray]]:
    """By kind of files and group."""
    tables: dict[str, dict[str, np.ndarray]] = {}
    for name, group in groups().items():
        size, prose = group.most * 1e6, PROSE_MB * 1e6
        code = not group.prose
        texts = {
            "counted": read(root, group.patterns, size, False, HELD_OUT, code),
            "prose": read(root, group.prose, prose, False, HELD_PROSE),
            "other files": read(root, group.patterns, size / HELD_OUT, True, HELD_OUT, code),
            "other prose": read(root, group.prose, prose, True, HELD_PROSE),
        }
        for kind, of in texts.items():
            tables.setdefault(kind, {})[name] = count(tokenizer, of, rows)
        print(name, {kind: int(table[name].sum()) for kind, table in tables.items()}, flush=True)
    return tables


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("packages", type=Path)
    parser.add_argument("--rows", type=int, default=248_320, help="of the model's vocabulary")
    parser.add_argument("--listed", type=int, default=LISTED)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ids", type=Path)
    args = parser.parse_args(words)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    vocabulary = json.loads(args.tokenizer.read_bytes())["model"]["vocab"]
    special = {*tokenizer.get_added_tokens_decoder()}
    tokens = 1 + max(i for i in vocabulary.values() if i not in special)
    needed = special | {i for token, i in vocabulary.items() if len(token) == 1}  # and bytes
    tables = counts_of(args.packages, tokenizer, args.rows)
    total = weights(tables["counted"], tables["prose"], tokens)
    best = [i for i in np.argsort(-total, kind="stable").tolist() if i not in needed]
    ids = sorted({*best[: max(0, args.listed - len(needed))], *needed})
    inside = np.zeros(args.rows, bool)
    inside[ids] = True
    for name in groups():
        both = (tables[kind][name] for kind in ("other files", "other prose"))
        found = [f"{_share(counts, inside):.1%}" if counts.sum() else "" for counts in both]
        print(f"| {name} | {found[0]} | {found[1]} |")
    if args.ids:
        args.ids.write_text("".join(f"{i}\n" for i in ids))
    if args.out:
        packed = b64encode(zlib.compress(np.packbits(inside).tobytes(), 9)).decode()
        known = {"rows": args.rows, "tokens": tokens, "digest": digest(vocabulary, tokens)}
        args.out.write_text(json.dumps(known | {"ids": packed}, indent=1) + "\n")


def _share(counts: np.ndarray, inside: np.ndarray) -> float:
    return float(counts[inside].sum() / counts.sum())


if __name__ == "__main__":
    main()
