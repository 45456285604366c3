"""Turn texts and the generators into packed rows of token ids, and keep a hold-out apart.

Knows the mixture's parts and the chat form; knows nothing of the network. A row is 1,025 ids
(uint16); each row begins at the start of a document. Ids with bit 15 set are read but not
trained on (what the user says).
  python -m training.corpus --texts DIR --out DIR [--stories N --chat N --short N]
"""

import argparse
import hashlib
import json
import multiprocessing
import random
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.chatgen import Chat, Exchange, chat
from training.storyteller import tell

CHECKPOINT = Path(__file__).parent.parent / "models" / "tiny" / "checkpoint"
ROW = 1025
UNTRAINED = 1 << 15
HELD_OUT_IN = 20
END = "<|endoftext|>"
SMALL = (
    "asp_ccby",
    "pb_ccby",
    "fairytaleqa_stories",
    "lcats_grimm",
    "lcats_anderson",
    "lcats_wilde_happy_prince",
    "aesop_for_children",
)
OLD = ("chilit_simple",)
SIMPLEST = ("asp_ccby", "pb_ccby", "aesop_for_children")

Ids = NDArray[np.uint16]
Piece = tuple[str, bool]


def is_held_out(text: str) -> bool:
    """One document in twenty, by a hash of its beginning."""
    return (
        int.from_bytes(hashlib.blake2b(text[:200].encode(), digest_size=4).digest()) % HELD_OUT_IN
        == 0
    )


def read_documents(texts: Path, names: Iterable[str]) -> list[str]:
    """All documents of the named files, white space tidied."""
    documents = []
    for name in names:
        raw = (texts / f"{name}.txt").read_text(encoding="utf-8").split(END)
        tidy = (re.sub(r"[ \t]+", " ", text).strip() for text in raw)
        documents += [text for text in tidy if len(text) > 80]
    return documents


def openings(text: str) -> set[str]:
    """The first 60 characters of every longer paragraph: the fingerprint by which a repeated text
    is known.
    """
    return {line.strip()[:60] for line in text.split("\n") if len(line.strip()) > 80}


def split_documents(
    texts: Path, names: Iterable[str], secret: set[str]
) -> tuple[list[str], list[str]]:
    """(training, held out); a training document that shares a paragraph with the hold-out is
    dropped.
    """
    documents = read_documents(texts, names)
    held = [text for text in documents if is_held_out(text)]
    return [
        text for text in documents if not is_held_out(text) and not openings(text) & secret
    ], held


def render(conversation: Chat, thinking: bool) -> list[Piece]:
    """A conversation in the chat form as (text, trained) pieces; only the last answer carries a
    think block.
    """
    pieces: list[Piece] = []
    if conversation.system:
        pieces.append((f"<|im_start|>system\n{conversation.system}<|im_end|>\n", False))
    last = len(conversation.exchanges) - 1
    for at, exchange in enumerate(conversation.exchanges):
        head = f"<|im_start|>user\n{exchange.ask}<|im_end|>\n<|im_start|>assistant\n"
        thought = ""
        if at == last:
            head += "<think>\n" if thinking else "<think>\n\n</think>\n\n"
            thought = f"{exchange.thought}\n</think>\n\n" if thinking else ""
        pieces.append((head, False))
        pieces.append((f"{thought}{exchange.answer}<|im_end|>", True))
        pieces.append(("\n", False))
    return pieces


def encode(pieces: list[Piece], tokenizer: Tokenizer) -> Ids:
    """Token ids of the pieces, then the end-of-text id; untrained pieces are flagged."""
    parts = []
    for text, trained in pieces:
        ids = np.array(tokenizer.encode(text).ids, dtype=np.uint16)
        parts.append(ids if trained else ids | UNTRAINED)
    parts.append(np.array([tokenizer.token_to_id(END)], dtype=np.uint16))
    return np.concatenate(parts)


def story_document(rng: random.Random) -> list[Piece]:
    """A generated story as plain text, with a title now and then."""
    story = tell(rng)
    return [(f"{story.title}\n{story.text}" if rng.random() < 0.3 else story.text, True)]


def chat_document(rng: random.Random, short_share: float) -> list[Piece]:
    """A generated conversation; four in ten end in thinking mode."""
    conversation = chat(rng, short_share)
    thinking = bool(conversation.exchanges[-1].thought) and rng.random() < 0.4
    return render(conversation, thinking)


def pack(documents: Iterable[Ids]) -> Ids:
    """Fill rows with whole documents; the last one of a row is cut, long ones run over several
    rows. [rows, ROW]
    """
    rows: list[Ids] = []
    row = np.empty(ROW, dtype=np.uint16)
    used = 0
    for ids in documents:
        at = 0
        while at < len(ids):
            take = min(ROW - used, len(ids) - at)
            row[used : used + take] = ids[at : at + take]
            used, at = used + take, at + take
            if used == ROW:
                rows.append(row.copy())
                used = 0
                if len(ids) < ROW:
                    break
    return np.stack(rows) if rows else np.empty((0, ROW), dtype=np.uint16)


def generate(job: tuple[int, int], make: Callable[[random.Random], list[Piece]]) -> Ids:
    """Rows of generated documents: (seed, how many tokens)."""
    seed, tokens = job
    rng, tokenizer = random.Random(seed), Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))

    def documents() -> Iterator[Ids]:
        made = 0
        while made < tokens:
            ids = encode(make(rng), tokenizer)
            made += len(ids)
            yield ids

    return pack(documents())


def repack(documents: list[Ids], copies: int, rng: random.Random) -> Ids:
    """The same documents in several orders, so that the cuts fall elsewhere each time."""
    packed = []
    for _ in range(copies):
        rng.shuffle(documents)
        packed.append(pack(documents))
    return np.concatenate(packed)


def tale_questions(path: Path, secret: set[str]) -> list[list[Piece]]:
    """FairytaleQA as chat, without questions on passages in the hold-out."""
    known = "\n".join(secret)
    chats = []
    for entry in json.loads(path.read_text(encoding="utf-8")):
        context, ask, answer = entry["context"].strip(), entry["q"].strip(), entry["a"].strip()
        if (
            not answer
            or len(context) > 2400
            or context[:50] in known
            or any(key in context for key in openings(context) & secret)
        ):
            continue
        answer = answer[0].upper() + answer[1:] + ("" if answer[-1] in ".!?" else ".")
        asked = Exchange(f"Read this story.\n{context}\n{ask[0].upper() + ask[1:]}", answer)
        chats.append(render(Chat("tale", "", (asked,)), thinking=False))
    return chats


def real_parts(texts: Path, tokenizer: Tokenizer, rng: random.Random) -> dict[str, Ids]:
    """Rows of the real documents, training and held-out parts."""
    held = [text for text in read_documents(texts, SMALL + OLD) if is_held_out(text)]
    secret = set().union(*map(openings, held))
    parts: dict[str, Ids] = {}

    def rows(documents: list[str], copies: int) -> Ids:
        return repack([encode([(text, True)], tokenizer) for text in documents], copies, rng)

    small, small_held = split_documents(texts, SMALL, secret)
    old, old_held = split_documents(texts, OLD, secret)
    parts["real"], parts["old"] = rows(small, 8), rows(old, 4)
    parts["simplest"] = rows(split_documents(texts, SIMPLEST, secret)[0], 8)
    parts["heldout_real"], parts["heldout_old"] = rows(small_held, 1), rows(old_held, 1)
    tales = [
        encode(pieces, tokenizer)
        for pieces in tale_questions(texts / "fairytaleqa_qa.json", secret)
    ]
    parts["tales"] = repack(tales, 1, rng)
    return parts


def main() -> None:
    """Write one .npy file of rows for each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stories", type=float, default=120e6, help="tokens of generated stories")
    parser.add_argument(
        "--chat", type=float, default=100e6, help="tokens of chat with stories in it"
    )
    parser.add_argument("--short", type=float, default=60e6, help="tokens of short questions")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    makers: dict[str, tuple[float, Callable[[random.Random], list[Piece]], int]] = {
        "stories": (arguments.stories, story_document, 1_000),
        "chat": (arguments.chat, partial(chat_document, short_share=0.0), 2_000),
        "short": (arguments.short, partial(chat_document, short_share=1.0), 3_000),
        "heldout_stories": (150e3, story_document, 900_000),
        "heldout_chat": (150e3, partial(chat_document, short_share=0.4), 910_000),
    }
    with multiprocessing.Pool(arguments.workers) as pool:
        for name, (tokens, make, seed) in makers.items():
            shares = 1 if name.startswith("heldout") else arguments.workers * 2
            jobs = [(seed + at, int(tokens / shares)) for at in range(shares)]
            rows = np.concatenate(pool.map(partial(generate, make=make), jobs, chunksize=1))
            np.save(arguments.out / f"{name}.npy", rows)
            print(f"{name}: {rows.shape[0]} rows", flush=True)
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    for name, rows in real_parts(arguments.texts, tokenizer, random.Random(11)).items():
        np.save(arguments.out / f"{name}.npy", rows)
        print(f"{name}: {rows.shape[0]} rows", flush=True)


if __name__ == "__main__":
    main()
