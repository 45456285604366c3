"""A build's options (`Options`), and the plan they resolve to for one checkpoint (`BuildPlan`).

Knows defaults and limits of options; knows no graph. `resolve` replaces "auto" and None by values
once, so that no later step has to.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from spark_engine import hints, kernel
from spark_engine.builder.plan import budget
from spark_engine.builder.plan.buckets import (
    FINER_PREFILL,
    Buckets,
    Rounds,
    Size,
    bucket_sizes,
    cpu_rounds,
    decode_rows,
    fine_decode_rows,
    finer_rows,
)
from spark_engine.builder.plan.budget import Needs
from spark_engine.builder.plan.drafts import DEFAULT, DraftRequest, HeadFacts, Vocab, decide
from spark_engine.builder.plan.images import decide as decide_images
from spark_engine.builder.plan.ring import ring_length
from spark_engine.errors import OptionError
from spark_engine.interface import DECODE, MOST, PREFILL, PREFILL_TILE, Limits, Precision
from spark_engine.kernel import Target
from spark_engine.models.draft_options import DraftOptions
from spark_engine.plugins.state.replay_ring import ring_records
from spark_engine.tensors import DType
from spark_engine.vision import VisionInfo

CPU = "cpu"
OTHER_CARDS = (
    "for another RTX card with FP8 there is --target rtx: TensorRT-RTX compiles the same graph, to "
    "check answers with spark-check --against, not to serve a large model"
)
RTX = "rtx"  # every GPU that TensorRT-RTX compiles bf16 and FP8 for
CAPABILITIES = ("SM89", "SM120", "SM121")  # its GPUs: one engine runs on all of them
TARGETS = {CPU: "ort", RTX: "trt", **dict.fromkeys(kernel.TARGETS, "native")}  # and its executor
BACKENDS = {"ort": "executors.ort", "trt": "executors.trt", "native": "native.backend"}  # modules
KV_DTYPES = ("f32", "bf16", "fp8")
STATE_DTYPES = ("f32", "f16", "bf16")
CPU_MAX_CONTEXT = 4096
CPU_MAX_SEQS = 32
KV_BUDGET = 2 << 30  # bytes of KV by default on a CPU


@dataclass(frozen=True)
class Options:
    """The options of one build. None and "auto" mean: decide from the checkpoint and target.

    For `resolve` a target "auto" is the CPU, or the named card's target: a caller that looks for a
    GPU does so before, and passes it as `gpu`.
    """

    target: str = "auto"
    card: str = "auto"  # the GPU that decides memory and multiprocessors
    rehearses: str = ""  # the target that the build rehearses
    decode: tuple[int, ...] | None = None  # rows of each decode bucket
    prefill: tuple[int, ...] | None = None  # tokens of each prefill bucket
    verify: Rounds | None = None  # rows and drafts of each bucket that verifies
    max_context: int | None = None  # tokens of the longest sequence
    rope_scaling: Mapping[str, Any] | None = None  # in place of the checkpoint's
    max_seqs: int | None = None
    kv_tokens: int | None = None  # tokens that the KV pages hold, all sequences together
    cache_gib: float | None = None  # GiB that snapshots of the prefix cache may take, 0 for none
    kv_dtype: str = "auto"
    state_dtype: str = "auto"
    gdn_ring: int | None = None  # records behind each recurrent state, 0 for none
    drafts: int | None = None  # of a round at most, 0 for none
    draft_dtype: str = "auto"  # how the draft head is stored
    draft_vocab: Vocab = "auto"  # ids that it drafts from
    drafter: str | None = None  # folder of a block drafter
    draft_suffix: int = 0  # fewest ids of a match from which text is drafted, 0 for none
    mlp_activations: str = "auto"  # of NVFP4 MLPs in prefill: bf16 as they are, or fp8
    activation: str = "auto"  # f32 on the CPU, bf16 on a GPU; bf16 on the CPU to check a GPU's
    fuse: bool = True
    debug: bool = False
    timing: bool | None = None  # tactics timed on the GPU; None: where the target is present
    invariant: bool = False  # a sequence's bits do not depend on the bucket it runs in
    vision: bool = True  # with the vision tower, if the checkpoint has one
    max_image_pixels: int | None = None  # area of the largest image after resizing
    tp: int = 1  # ranks that share every tensor, each on its own GPU
    across_hosts: bool = False  # the ranks are on several hosts, which NCCL connects
    gpu: Target | None = None  # the resolved target and card

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class ModelFacts:
    """The facts on which defaults depend. `kv_token_width` counts K and V values of one token.

    `weight_bytes` are the checkpoint's, `wide_bytes` those of f32 matrices among them, which a GPU
    keeps in half; `state_width`, `record_width` and `conv_width` count values of one sequence's
    recurrent states, of one record in each of its rings, of its convolutions, and `conv_channels`
    of one token in all of these. `head` is None where the checkpoint has no draft head.
    """

    max_context: int
    vocab: int
    kv_token_width: int  # 2 · full-attention layers · kv_heads · head_dim
    kv_dtype: DType | None  # declared by the checkpoint
    state_dtype: DType | None
    weight_bytes: int = 0
    state_width: int = 0
    conv_width: int = 0
    record_width: int = 0
    wide_bytes: int = 0
    conv_channels: int = 0
    head: HeadFacts | None = None
    no_head: str = "the checkpoint has no draft head"  # why, where it has none
    vision: VisionInfo | str = ""  # how it reads images, or why it reads none
    vision_bytes: int = 0  # of the tower, which are not among the others
    hidden: int = 0
    experts: bool = False

    def needs(
        self,
        precision: Precision,
        page_size: int,
        ring: int = 0,
        drafts: int = 0,
        draft: DraftOptions | None = None,
        suffix: int = 0,
    ) -> Needs:
        """The sizes in bytes at these dtypes; a sequence also has a count for each id of the
        vocabulary.

        With drafts it also has more records, columns of its convolutions, positions, logits for
        each draft, next to the largest bucket's, and the head's part of the KV cache; with `suffix`
        a page has the ids of its tokens.
        """
        kept = self.state_width * precision.state.itemsize
        kept += 4 * ring_records(ring, drafts) * self.record_width
        columns = self.conv_width + ((drafts + 1) * self.conv_channels if drafts else 0)
        kept += columns * precision.activation.itemsize
        slot, width, weights = kept + 4 * self.vocab, self.kv_token_width, self.weight_bytes
        if drafts:
            slot += 4 * (1 + drafts) + 4 * drafts * self.vocab
        if draft is not None and self.head is not None:
            width += self.head.kv_token_width
            weights += len(draft.shortlist or ()) * self.head.row_bytes
        page = page_size * (width * precision.kv.itemsize + (4 if suffix else 0))
        halved = self.wide_bytes // 2 if precision.activation is DType.BF16 else 0
        return Needs(weights - halved, slot, page, kept)


@dataclass(frozen=True)
class BuildPlan:
    """Everything decided before a graph is built. `notes` are sentences for the report; `finer` are
    sizes that a build which times tactics adds if they pay."""

    target: str
    limits: Limits
    precision: Precision
    buckets: Buckets
    fuse: bool
    debug: bool
    notes: tuple[str, ...]
    timing: bool | None = None
    invariant: bool = False
    gpu: Target | None = None
    draft: DraftOptions | None = None  # of the draft head; None: no head
    finer: tuple[Size, ...] = ()
    ranks: int = 1
    across: bool = False  # the ranks are on several hosts
    vision: VisionInfo | None = None  # None: without the vision tower
    mlp_activations: str = "auto"


def resolve(options: Options, facts: ModelFacts) -> BuildPlan:
    """Decides every open option. Raises OptionError for a value that is impossible."""
    gpu = options.gpu or gpu_of(options)
    target = gpu.name if gpu else CPU if options.target == "auto" else options.target
    if target == RTX and options.tp > 1:
        raise OptionError(f"--tp {options.tp}: --target {RTX} has one rank; name another target")
    if options.across_hosts and (gpu is None or options.tp == 1):
        why = "there is one rank: give --tp" if gpu else f"{CPU} engines with --tp run there as is"
        raise OptionError(f"--across-hosts is for GPUs of several hosts; {why}")
    if gpu is None and options.timing:
        raise OptionError("--timing: the CPU has no tactics to time; give a CUDA --target")
    if target == RTX and options.invariant:
        raise OptionError(
            f"--invariant: TensorRT chooses its own order of sums, bucket by bucket, for --target "
            f"{RTX}; leave it out, or name another target"
        )
    precision = _precision(options, facts, gpu)
    asked = DEFAULT if options.drafts is None and options.verify else options.drafts
    if target == RTX and asked is None:
        asked = 0  # its engines sample after the network
    suffix = options.draft_suffix
    requested = DraftRequest(asked, options.draft_dtype, options.draft_vocab, suffix)
    drafts = decide(requested, facts.head or facts.no_head, facts.vocab, gpu)
    ring = ring_length(options.gdn_ring, facts.state_width, bool(gpu), drafts.drafts)
    images = decide_images(options.vision, options.max_image_pixels, facts.vision, gpu)
    needs = facts.needs(precision, Limits.page_size, ring, drafts.drafts, drafts.head, suffix)
    if images.info is not None:
        of_rows = (images.rows + 1) * facts.hidden * precision.activation.itemsize
        needs = replace(needs, weights=needs.weights + facts.vision_bytes, images=of_rows)
    seqs = _seqs(options, budget.sequences(gpu, needs) if gpu else CPU_MAX_SEQS)
    most = budget.MAX_CONTEXT if gpu else CPU_MAX_CONTEXT
    context = _context(options.max_context, min(facts.max_context, MOST["max_context"]), most)
    limits = Limits(max_seqs=seqs, max_context=context, pages=0, vocab=facts.vocab)
    cache = _cache(options.cache_gib)
    free = budget.pages(gpu, needs, seqs, cache) if gpu else KV_BUDGET // max(1, needs.page)
    pages, note = _pages(options.kv_tokens, limits, free, gpu is not None)
    snapshots = 0 if gpu else budget.cpu_snapshots(needs, seqs, cache)
    more = {"pages": pages, "gdn_ring": ring, "drafts": drafts.drafts, "snapshots": snapshots}
    limits = replace(limits, **more, image_rows=images.rows, suffix=suffix)
    buckets = _buckets(options, limits, gpu, images.patches, facts.experts)
    return BuildPlan(
        target, limits, precision, buckets, options.fuse, options.debug,
        (*drafts.notes, *note), options.timing, options.invariant, gpu, drafts.head,
        _finer(options, limits, gpu), options.tp, options.across_hosts, images.info,
        options.mlp_activations,
    )  # fmt: skip


def gpu_of(options: Options, present: Target | None = None) -> Target | None:
    """The GPU to build for; None: the CPU.

    The named card; else the `present` one, if it has the target's architecture; else the
    architecture's first. With `rehearses`, the part of it that represents the rehearsed GPU. Raises
    OptionError for unknown names, or names that contradict each other.
    """
    on = _hardware(options, present)
    if not options.rehearses:
        return on
    of = kernel.TARGETS.get(options.rehearses)
    if of is None:
        near, known = hints.near(options.rehearses, (*kernel.TARGETS,)), ", ".join(kernel.TARGETS)
        raise OptionError(f"--as {options.rehearses} is no GPU target{near} (choose from {known})")
    if on is None and options.target != "auto":
        raise OptionError(f"--as {of.name} is for a GPU, not for --target {options.target}")
    on = on or kernel.KNOWN[0]
    return on if on.architecture.rehearses == of.name else kernel.rehearsal(of, on)


def timed_by_default(gpu: Target) -> bool:
    """True if tactics are timed by default: not in a rehearsal, which uses the tactics that are
    chosen for the rehearsed GPU, since this GPU's memory is faster."""
    return not gpu.architecture.rehearses


def _hardware(options: Options, present: Target | None) -> Target | None:
    target, card = _checked_target(options.target), options.card
    if card != "auto":
        named = kernel.CARDS[_known("--card", card, kernel.CARDS, more=f"; {OTHER_CARDS}")]
        if target not in ("auto", named.name):
            raise OptionError(f"--card {card} is of {named.name}, not of --target {target}")
        return named
    if present and target in ("auto", present.name):
        return present
    return kernel.TARGETS.get(target)


def target_for(executor: str, target: str) -> str:
    """The target that both names select. Raises OptionError if they contradict each other."""
    if executor == "auto":
        return target
    _known("--executor", executor, BACKENDS)
    mine = [name for name, found in TARGETS.items() if found == executor]
    if _checked_target(target) == "auto" and len(mine) == 1:
        return mine[0]
    if target not in mine:
        raise OptionError(
            f"--executor {executor} runs --target {' or '.join(mine)}, not {target}: name that"
        )
    return target


def _checked_target(name: str) -> str:
    by_name = f"; a GPU is named by its architecture: {', '.join(kernel.TARGETS)}"
    general = name.lower() in ("cuda", "gpu", "nvidia")
    return _known("--target", name, TARGETS, by_name if general else "")


def _known(option: str, name: str, known: Iterable[str], near: str = "", more: str = "") -> str:
    """The name, if it is known or `auto`. Else raises OptionError with the likely name."""
    names = ("auto", *known)
    if name not in names:
        near = near or hints.near(name, names)
        words = f"{option} {name} is not known{near} (choose from {', '.join(names)})"
        raise OptionError(words + more)
    return name


def _precision(options: Options, facts: ModelFacts, gpu: Target | None) -> Precision:
    """Activations are f32 on the CPU, bf16 on a GPU; KV and state follow the checkpoint by
    default, but states are f16 where a GPU's memory is slow (docs/decisions.md, 4)."""
    activation = DType.BF16 if gpu else DType.F32
    if options.activation != "auto":
        activation = _dtype("activation", options.activation, ("f32", "bf16"))
        if gpu and activation is not DType.BF16:
            raise OptionError(f"activations are bf16 on {gpu.name}, not {activation}")
    kv = facts.kv_dtype or activation
    if options.target == RTX and kv is DType.F8E4M3:
        kv = DType.BF16  # its parser has no FP8 pages
    state = DType.F16 if gpu and gpu.slow else facts.state_dtype or DType.F32
    if options.kv_dtype != "auto":
        kv = _dtype("--kv-dtype", options.kv_dtype, KV_DTYPES)
    if options.state_dtype != "auto":
        state = _dtype("--state-dtype", options.state_dtype, STATE_DTYPES)
    if gpu and kv is DType.F32:
        raise OptionError(f"--kv-dtype f32: {gpu.name} keeps bf16 or fp8 pages; choose one of them")
    return Precision(activation, kv, state)


def _dtype(option: str, name: str, legal: tuple[str, ...]) -> DType:
    _known(option, name, legal)
    return DType.F8E4M3 if name == "fp8" else DType(name)


def _buckets(
    options: Options, limits: Limits, gpu: Target | None, vision: tuple[int, ...], experts: bool
) -> Buckets:
    decode, verify = options.decode, options.verify
    prefill = budget.prefill(gpu, experts) if gpu and options.prefill is None else options.prefill
    if gpu and decode is None:
        decode = fine_decode_rows(limits.max_seqs)
    if gpu is None and verify is None:
        rows = decode_rows(limits.max_seqs) if decode is None else (*decode, limits.max_seqs)
        verify = cpu_rounds(rows, limits.drafts)
    return bucket_sizes(decode, prefill, limits, verify, vision)


def _finer(options: Options, limits: Limits, gpu: Target | None) -> tuple[Size, ...]:
    """Finer sizes of families without an option for theirs; none if all buckets must agree."""
    if gpu is None or options.invariant:
        return ()
    most = max(budget.prefill(gpu))
    rows = finer_rows(limits.max_seqs) if options.decode is None else ()
    tokens = [t for t in FINER_PREFILL if t < most] if options.prefill is None else []
    return (*(Size(DECODE, r) for r in rows), *(Size(PREFILL, t // PREFILL_TILE) for t in tokens))


def _seqs(options: Options, default: int) -> int:
    """The option, or the rows of the largest requested decode bucket."""
    given, most = options.max_seqs, MOST["max_seqs"]
    if given is None and options.decode:
        return _counted("--decode", max(options.decode), most)
    return _counted("--max-seqs", default if given is None else given, most)


def _context(requested: int | None, most: int, default: int) -> int:
    if requested is None:
        return min(most, default)
    if not 0 < requested <= most:
        raise OptionError(
            f"--max-context {requested}: the model's positions allow 1 to {most}; --rope-scaling "
            "yarn:N makes them N times as many"
        )
    return requested


def _pages(
    requested: int | None, limits: Limits, free: int, gpu: bool
) -> tuple[int, tuple[str, ...]]:
    """KV pages for `requested` tokens, or for every sequence at full length within `free` pages."""
    least, size = limits.pages_per_seq, limits.page_size
    most = limits.max_seqs * least
    if requested is not None:
        pages = -(-_counted("--kv-tokens", requested, MOST["pages"] * size) // size)
        if pages < least:
            raise OptionError(
                f"--kv-tokens {requested} holds less than one sequence of --max-context "
                f"{limits.max_context}: give at least {least * size}"
            )
        return min(pages, most), ()
    pages = max(least, min(most, free))
    if pages == most:
        return pages, ()
    tokens = pages * size
    why = "fit the memory of the target" if gpu else f"stay near {KV_BUDGET >> 30} GiB"
    return pages, (
        f"KV pages hold {tokens} tokens, not {limits.max_seqs} sequences of "
        f"{limits.max_context}, to {why}; --kv-tokens changes that",
    )


def _cache(gib: float | None) -> int | None:
    """Bytes of snapshots. Raises OptionError for a negative size."""
    if gib is not None and not 0 <= gib < 1 << 20:
        raise OptionError(f"--cache-gib {gib}: give GiB for the prefix cache, 0 for none")
    return None if gib is None else int(gib * (1 << 30))


def _counted(option: str, value: int, most: int) -> int:
    if not 0 < value <= most:
        raise OptionError(f"{option} {value}: give 1 to {most}")
    return value
