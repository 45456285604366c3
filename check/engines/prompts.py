"""The inputs of a check: seeded sequences with lengths on both sides of every boundary.

Knows the step inputs and tables of docs/graph.md and an engine's limits and buckets; knows no model
and runs nothing. Tokens are forced (no step reads a token that another step sampled), so that two
engines that once disagree still get the same input afterwards.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spark_engine import interface
from spark_engine.interface import PREFILL, PREFILL_TILE, ROPE_ROWS
from spark_engine.tensors import Array

LENGTHS = (1, 63, 64, 65, 127, 128, 129)  # prompts around the page, the tile and two of each
SAMPLED = -1  # a next id: the one that this launch samples (not forced)
FROM_STATE = -1  # a token id or a start: as the slot's states say
DECODED = 3  # forced tokens decoded after each prompt
ODD_SPLIT = 37  # a prefill that stops here and continues later
GENERATED = 24  # tokens decoded greedily after each prompt of the text level


@dataclass(frozen=True)
class CheckLaunch:
    """One launch of a bucket: the arrays of docs/graph.md's step inputs."""

    family: str
    rows: int
    token_ids: Array  # i32 [rows * tile]
    slots: Array  # i32 [rows], as are the rest
    starts: Array
    counts: Array
    emit: Array
    next_ids: Array

    def feed(self) -> dict[str, Array]:
        """The step inputs by name, also those of some engines and families only."""
        names = ("token_ids", "slots", "starts", "counts", "emit", "next_ids")
        given = {name: getattr(self, name) for name in names}
        turns = ROPE_ROWS * PREFILL_TILE if self.family == PREFILL else 1
        offsets = np.zeros((self.rows, turns), np.int32)
        states = {"sources": self.slots, "saves": np.full_like(self.slots, -1)}
        return {**given, **states, "rope_offsets": offsets}


@dataclass(frozen=True)
class CheckText:
    """One sequence: its slot and pages, its tokens, and the length of its prompt."""

    slot: int
    pages: tuple[int, ...]
    ids: tuple[int, ...]
    prompt: int


@dataclass(frozen=True)
class CheckSession:
    """Launches over initially empty states, with the same tables for all."""

    label: str
    texts: tuple[CheckText, ...]
    tables: dict[str, Array]
    launches: tuple[CheckLaunch, ...]


def sessions(
    limits: interface.Limits,
    buckets: Sequence[tuple[str, int]],
    seed: int = 0,
    recorded: Sequence[Sequence[int]] = (),
) -> list[CheckSession]:
    """Every session of a check.

    Args:
        limits: of the engine (the smaller of both, if two are compared).
        buckets: (family, rows) that may be launched; each is launched at least once.
        seed: of the tokens, the slots and the order of the pages.
        recorded: token ids of real prompts, run in addition to the random ones.
    """
    rng = np.random.default_rng(seed)
    prompts = [_random(rng, n, limits.vocab) for n in LENGTHS if n + DECODED <= limits.max_context]
    prompts += [list(ids)[: limits.max_context - DECODED] for ids in recorded]
    decode = sorted(rows for family, rows in buckets if family == "decode")
    prefill = sorted(rows for family, rows in buckets if family == "prefill")
    full, every = decode[-1:] * DECODED, [*decode[-1:] * DECODED, *decode[:-1]]
    found = []
    for i, group in enumerate(_groups(prompts, limits, len(every))):
        steps = full if i else every
        found.append(_session(rng, "ragged", group, prefill[-1], steps, limits))
    verify = sorted((interface.drafts_of(f), rows) for f, rows in buckets if interface.drafts_of(f))
    if verify:
        more = len(verify) + verify[-1][0]
        short = [p for p in prompts if len(p) + more <= limits.max_context]
        group = _groups(short, limits, more)[0]
        found.append(_rounds(rng, group, prefill[-1], verify, limits))
    longest = sorted(prompts, key=len)[-1:]
    for rows in prefill[:-1]:
        found.append(_session(rng, f"prefill_t{rows * 64}", longest, rows, full[:1], limits))
    # No prefill: a full bucket from the first token on.
    first = [_random(rng, 1, limits.vocab) for _ in range(decode[-1])]
    group = _groups(first, limits)[0]
    found.append(_session(rng, f"decode_b{decode[-1]}", group, 0, full, limits))
    if max(map(len, prompts)) > ODD_SPLIT:
        group = _groups([p for p in prompts if len(p) > ODD_SPLIT][-2:], limits)[0]
        found.append(_session(rng, "split", group, prefill[-1], full[:1], limits, ODD_SPLIT))
    return found


def greedy_session(
    limits: interface.Limits,
    buckets: Sequence[tuple[str, int]],
    seed: int = 0,
    recorded: Sequence[Sequence[int]] = (),
) -> CheckSession:
    """Prompts for greedy decoding: has the launches of their prefills; `next_launches` has the
    rest.

    As many of the recorded prompts and of random ones as fit, cut so that GENERATED tokens (or half
    the context, if that is less) fit. The texts' ids after the prompt have no meaning.
    """
    rng = np.random.default_rng(seed)
    reply_tokens = min(GENERATED, limits.max_context // 2)
    prompts = [list(ids) for ids in recorded]
    prompts += [_random(rng, n, limits.vocab) for n in LENGTHS]
    cut = [ids[: limits.max_context - reply_tokens] for ids in prompts]
    rows = {f: max(n for family, n in buckets if family == f) for f in interface.families(0)}
    group = _groups(cut, limits, reply_tokens)[0]
    made = _session(rng, "greedy", group, rows["prefill"], (), limits, more=reply_tokens)
    return made


def next_launches(
    session: CheckSession, tokens: Mapping[int, Sequence[int]], rows: int
) -> Iterator[CheckLaunch]:
    """One decode step: each text's input is the last of its tokens in `tokens`, by slot.

    `rows` is the decode bucket. A text at the end of its context is left out.
    """
    going = []
    for text in session.texts:
        ids = (*text.ids[: text.prompt], *tokens[text.slot])
        if len(ids) <= len(text.ids):
            going.append((replace(text, ids=ids), len(ids) - 1, 1))
    for i in range(0, len(going), rows):
        yield _launch("decode", rows, going[i : i + rows])


def verified(rows: int, k: int, going: Sequence[tuple[CheckText, int, int]]) -> CheckLaunch:
    """A round of k drafts. `going`: texts, their positions, and the number of input tokens."""
    return _launch(interface.verify_family(k), rows, going)


def _rounds(
    rng: np.random.Generator,
    prompts: list[list[int]],
    prefill_rows: int,
    verify: Sequence[tuple[int, int]],
    limits: interface.Limits,
) -> CheckSession:
    """A round in every bucket (drafts, rows), with as many texts as fit.

    Drafts are random, so almost none is accepted: each text gains one token a round, and the next
    round overwrites what the others wrote. Rows have all lengths.
    """
    more = len(verify) + verify[-1][0]
    session = _session(rng, "rounds", prompts, prefill_rows, (), limits, more=more)
    at = {text.slot: text.prompt for text in session.texts}
    launches = list(session.launches)
    for number, (k, rows) in enumerate(verify):
        some = session.texts[:rows]
        counts = [1 + (k - number - i) % (k + 1) for i in range(len(some))]
        going = [(text, at[text.slot], n) for text, n in zip(some, counts, strict=True)]
        launches.append(verified(rows, k, going))
        for text in some:
            at[text.slot] += 1
    return replace(session, launches=tuple(launches))


def default_tables(limits: interface.Limits) -> dict[str, Array]:
    """Tables for greedy decoding without penalties, and without pages."""
    tables = {spec.name: np.zeros(spec.dims, spec.dtype.numpy) for spec in interface.tables(limits)}
    for name in ("page_table", "bias_ids"):
        tables[name][:] = -1
    for column in ("top_p", "repetition"):
        tables["sampling_f"][:, interface.SAMPLING_F.index(column)] = 1
    return tables


def _random(rng: np.random.Generator, length: int, vocab: int) -> list[int]:
    return [int(i) for i in rng.integers(0, vocab, length)]


def _groups(
    prompts: Iterable[list[int]], limits: interface.Limits, more: int = DECODED
) -> list[list[list[int]]]:
    """The prompts in order, in as few groups as slots and pages allow; each grows by `more` tokens,
    or to the end of the context."""
    groups: list[list[list[int]]] = [[]]
    pages = 0
    for prompt in prompts:
        need = -(-min(len(prompt) + more, limits.max_context) // limits.page_size)
        if groups[-1] and (len(groups[-1]) == limits.max_seqs or pages + need > limits.pages):
            groups.append([])
            pages = 0
        groups[-1].append(prompt)
        pages += need
    return groups


def _session(
    rng: np.random.Generator,
    label: str,
    prompts: list[list[int]],
    prefill_rows: int,
    steps: Sequence[int],
    limits: interface.Limits,
    split: int = 0,
    more: int = 0,
) -> CheckSession:
    """`steps`: the decode buckets to step in, one after another. All texts step in the largest, in
    several launches if necessary, and as many as fit in the others. With `prefill_rows` 0 they
    start at the first token. `more`: the number of tokens, instead of that of `steps`."""
    slots = rng.permutation(limits.max_seqs)
    pages = iter(rng.permutation(limits.pages))
    texts = []
    for i, (prompt, slot) in enumerate(zip(prompts, slots, strict=False)):
        own = more or sum(_steps(i, rows, steps) for rows in steps) - (not prefill_rows)
        own = min(own, limits.max_context - len(prompt))
        ids = (*prompt, *_random(rng, own, limits.vocab))
        need = -(-len(ids) // limits.page_size)
        held = tuple(int(next(pages)) for _ in range(need))
        texts.append(CheckText(int(slot), held, ids, len(prompt)))
    tables = default_tables(limits)
    for text in texts:
        tables["page_table"][text.slot, : len(text.pages)] = text.pages
        tables["prompt_lens"][text.slot] = text.prompt
    launches = list(_prefill(texts, prefill_rows, split)) if prefill_rows else []
    launches += _decode(texts, steps, bool(prefill_rows))
    return CheckSession(label, tuple(texts), tables, tuple(launches))


def _steps(text: int, rows: int, steps: Sequence[int]) -> bool:
    """True if the text takes part in a step of the bucket."""
    return rows == max(steps) or text < rows


def _prefill(texts: Sequence[CheckText], rows: int, split: int) -> Iterator[CheckLaunch]:
    """All prompts, tiles packed; with `split` each prompt's tile ends there, in a separate launch.

    A tile is (text, start, count); only the last tile of a text in one launch may be short.
    """
    parts = [(0, split), (split, 1 << 30)] if split else [(0, 1 << 30)]
    tile = interface.PREFILL_TILE
    for low, high in parts:
        tiles = []
        for text in texts:
            end = min(high, text.prompt)
            tiles += [(text, at, min(tile, end - at)) for at in range(low, end, tile)]
        for i in range(0, len(tiles), rows):
            yield _launch("prefill", rows, tiles[i : i + rows])


def _decode(
    texts: Sequence[CheckText], steps: Sequence[int], prefilled: bool
) -> Iterator[CheckLaunch]:
    at = [text.prompt if prefilled else 0 for text in texts]
    for rows in steps:
        going = [i for i, x in enumerate(texts) if _steps(i, rows, steps) and at[i] < len(x.ids)]
        for first in range(0, len(going), rows):
            some = going[first : first + rows]
            yield _launch("decode", rows, [(texts[i], at[i], 1) for i in some])
        for i in going:
            at[i] += 1


def _launch(family: str, rows: int, tiles: Sequence[tuple[CheckText, int, int]]) -> CheckLaunch:
    tile = interface.tile_of(family)
    ids = np.zeros((rows, tile), np.int32)
    per_row = np.zeros((5, rows), np.int32)
    per_row[0] = -1
    for row, (text, start, count) in enumerate(tiles):
        end = start + count
        ids[row, :count] = text.ids[start:end]
        following = text.ids[end] if end < len(text.ids) else SAMPLED
        per_row[:, row] = text.slot, start, count, end >= text.prompt, following
    return CheckLaunch(family, rows, ids.reshape(-1), *per_row)
