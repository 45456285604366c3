"""The contract of a CUDA kernel: where it comes from, how it is launched, what it is given.

Knows no op and no CUDA binding. A tactic turns one node of fixed shapes into resolved launches,
so that running them needs neither the op nor its attributes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from spark_engine.errors import OptionError
from spark_engine.tensors import Array, TensorSpec

Attr = int | float | str
Attrs = Mapping[str, Attr]


@dataclass(frozen=True)
class Architecture:
    """What kernels of it may use, whichever card they run on."""

    name: str  # as NVRTC and `--target` are given it ("sm_90a")
    capability: tuple[int, int]  # major and minor compute capability, as the driver has it
    shared_bytes: int  # shared memory that one block may use
    sm_shared_bytes: int  # shared memory of a multiprocessor, for all its blocks
    # Kernels take the forms laid out for Hopper's 227 KiB of it, deeper and wider.
    large_shared: bool = False
    wgmma: bool = False  # warpgroup matrix instructions
    # Blocks of a cluster read each other's shared memory, up to eight of them. Only where it was
    # run: for GB10 such kernels compile, but sources disagree on whether it has distributed shared
    # memory at all, CUTLASS keeps its clusters at one block, and none was run there yet. A launch
    # that is refused, or wrong, would cost the engine, and clusters save a few microseconds.
    clusters: bool = False
    fp4_mma: bool = False  # block-scaled FP4 matrix instructions
    # The architecture that has these limits, where it is not this one (`rehearsal`).
    rehearses: str = ""


@dataclass(frozen=True)
class Card:
    """A GPU that is sold, or a part of one that the driver shows."""

    name: str  # as `--card` is given it ("h200")
    product: str  # how the driver's name for it begins
    sms: int  # streaming multiprocessors
    bandwidth: float  # DRAM bytes a second that a plain kernel reaches
    bf16_flops: float  # dense bf16 tensor-core operations a second that a library reaches
    memory: int  # bytes that a process may count on; where the host shares them, less its part


@dataclass(frozen=True)
class Target:
    """The target of compilation: an architecture, and its card for budgets and grids."""

    architecture: Architecture
    card: Card

    @property
    def name(self) -> str:
        return self.architecture.name

    @property
    def shared_bytes(self) -> int:
        return self.architecture.shared_bytes

    @property
    def large_shared(self) -> bool:
        return self.architecture.large_shared

    @property
    def wgmma(self) -> bool:
        return self.architecture.wgmma

    @property
    def clusters(self) -> bool:
        return self.architecture.clusters

    @property
    def fp4_mma(self) -> bool:
        return self.architecture.fp4_mma

    @property
    def sms(self) -> int:
        return self.card.sms

    @property
    def bandwidth(self) -> float:
        return self.card.bandwidth

    @property
    def slow(self) -> bool:
        """Under 1 TB/s: fewer bytes are worth more than what they round."""
        return self.bandwidth < 1e12

    @property
    def bf16_flops(self) -> float:
        return self.card.bf16_flops


_HOPPER = Architecture(
    "sm_90a", (9, 0), 232_448, 233_472, large_shared=True, wgmma=True, clusters=True
)
_SM_121 = Architecture("sm_121a", (12, 1), 101_376, 102_400, fp4_mma=True)
# A row for each card; without --card a build is for the first card of its architecture.
KNOWN = (
    Target(_HOPPER, Card("h200", "NVIDIA H200", 132, 4.3e12, 790e12, 139 << 30)),
    Target(_HOPPER, Card("h100", "NVIDIA H100", 132, 3.0e12, 790e12, 79 << 30)),
    Target(_SM_121, Card("gb10", "NVIDIA GB10", 48, 243e9, 100e12, 104 << 30)),
)
CARDS: Mapping[str, Target] = {t.card.name: t for t in KNOWN}
TARGETS: Mapping[str, Target] = {  # by architecture
    name: next(t for t in KNOWN if t.name == name) for name in dict.fromkeys(t.name for t in KNOWN)
}
H200, GB10 = CARDS["h200"], CARDS["gb10"]


def rehearsal(of: Target, on: Target) -> Target:
    """What would run on `of`, compiled for and run on a part of `on`.

    Kernels have `of`'s shared memory and instructions, so that its tactics are chosen and its
    sources compiled; those that `on` lacks are emulated (common/fp4_mma_sm120.cuh). Grids and costs
    are for `of`'s card, budgets for the memory of the nearest of `on`'s cards. Raises OptionError
    where `on` has less than `of`, or is of the same architecture.
    """
    if of.name == on.name:
        raise OptionError(f"{of.name} is not rehearsed on itself: build for --target {of.name}")
    if of.shared_bytes > on.shared_bytes or of.wgmma > on.wgmma or of.sms > on.sms:
        raise OptionError(
            f"{of.name} needs more than {on.name} has: only a larger GPU rehearses it"
        )
    near = min(
        (t.card for t in KNOWN if t.name == on.name), key=lambda c: abs(c.memory - on.card.memory)
    )
    name = f"{of.card.name} rehearsed on {near.name}"
    card = replace(of.card, name=name, product=near.product, memory=near.memory)
    runs = on.architecture
    limits = replace(of.architecture, name=on.name, capability=runs.capability, rehearses=of.name)
    return Target(limits, card)


def target_of(capability: tuple[int, int], product: str, sms: int, memory: int) -> Target | None:
    """What a driver describes: a card of the table, or one like the nearest there.

    A card outside the table has the multiprocessors `sms` and the bytes `memory`, and the bandwidth
    and rate of the nearest one. None where no architecture has the capability.
    """
    same = [t for t in KNOWN if t.architecture.capability == capability]
    for known in same:
        card = known.card
        if product.startswith(card.product) and sms == card.sms and memory >= card.memory:
            return known
    if not same:
        return None
    near = min(same, key=lambda t: (abs(t.sms - sms), abs(t.card.memory - memory)))
    name = f"{product}, {sms} SMs, {memory >> 30} GiB"
    card = replace(near.card, name=name, product=product, sms=sms, memory=memory)
    return Target(near.architecture, card)


@dataclass(frozen=True)
class Pointer:
    """The device address of the node's i-th input, output, or scratch buffer; or "peers", that of
    u64 [ranks]: where each rank's symmetric memory begins."""

    kind: Literal["input", "output", "scratch", "peers"]
    index: int


@dataclass(frozen=True)
class Rank:
    """The number of the rank that runs the launch, an i32 by value; 0 where one runs alone."""

    kind: Literal["i32"] = "i32"
    value: int = 0


@dataclass(frozen=True)
class Scalar:
    """A number passed by value."""

    kind: Literal["i32", "i64", "f32"]
    value: int | float


Arg = Pointer | Scalar | Rank
NCCL = "nccl"  # the `source` of a launch that is a call of that library, not a kernel
DECLARED = -1  # the `shared` of a launch that takes what its kernel declares
NULL = Scalar("i64", 0)  # the pointer of an operand that is not there


class Shape(NamedTuple):
    """How a kernel is launched, whichever kernel it is; the fields are `Launch`'s.

    `kinds` has "address" or a `Scalar`'s kind for each argument.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    kinds: tuple[str, ...]
    shared: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    pdl: bool = False


@dataclass(frozen=True)
class Early:
    """How a launch may overlap more with those around it than `Launch.pdl` says.

    Attributes:
        begins: what it reads before its wait is older than the `MOST_OPEN` launches before it
            (weights, states and rows of the step's beginning), so that it may begin while they run.
        lets: its kernel has the macro EARLY (common/early.cuh): 1 lets the next begin before the
            kernel's own wait.
        late: its kernel has the macro LATE: 1 reads the first input before the wait, which comes
            before the results are written, and lets the next begin at once.
        stages: macros and bytes of shared memory with which the kernel has more weights in flight
            before its wait, where it may begin early; the same bits.
    """

    begins: bool = False
    lets: bool = False
    late: bool = False
    stages: tuple[tuple[tuple[str, str], ...], int] | None = None


MOST_OPEN = 3  # launches before one that may still run when it begins


@dataclass(frozen=True)
class Launch:
    """One kernel launch, resolved but for addresses.

    Attributes:
        symbol: the `extern "C"` name.
        grid, block, cluster: blocks, threads, blocks of a cluster, along x, y, z.
        shared: bytes of dynamic shared memory: where the plan depends on them, a bound of what the
            kernel declares, and what its rows take; else DECLARED.
        args: in the kernel's order.
        defines: macros of this instantiation (`-DNAME=value`); equal (source, defines) are
            compiled once.
        pdl: programmatic dependent launch: it may begin while the launch before it still runs.
            The kernel waits (griddepcontrol.wait) before it reads what that launch writes or
            writes what it reads, and lets the next begin (griddepcontrol.launch_dependents) only
            after its own wait: so what is older than one launch may be read before the wait.
            Coherent loads only: no `const … __restrict__`.
        source: file name of the CUDA source in `plugins/kernels/`, where it is not the tactic's; or
            NCCL: then its call `symbol` is made over (input, output, bytes that this rank gives).
        resident: blocks wait for other blocks of the launch outside their cluster, so all of
            them must run at once: a GPU that cannot hold so many is refused. (Blocks that only
            count arrivals, and leave the rest to the last one, do not wait.)
        early: what `begin_early` may make of it (builder/native/early.py).
    """

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Arg, ...]
    shared: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    defines: tuple[tuple[str, str], ...] = ()
    pdl: bool = False
    source: str | None = None
    resident: bool = False
    early: Early = Early()

    @property
    def shape(self) -> Shape:
        """What the driver needs in addition to the kernel and the arguments' values."""
        kinds = tuple("address" if isinstance(a, Pointer) else a.kind for a in self.args)
        return Shape(self.grid, self.block, kinds, self.shared, self.cluster, self.pdl)


@dataclass(frozen=True)
class Scratch:
    """Device memory of one node. `zeroed`: zero before the first run; launches leave it zero."""

    nbytes: int
    zeroed: bool = False


@dataclass(frozen=True)
class Plan:
    """What a tactic does for one node of fixed shapes. `symmetric`: bytes of memory that each rank
    has for the others to read; zero before the first run, and shared by all nodes."""

    launches: tuple[Launch, ...]
    scratch: tuple[Scratch, ...] = ()
    symmetric: int = 0

    def launches_of(self, source: str) -> tuple[Launch, ...]:
        """The launches for a tactic of another source than `source`, this one's."""
        return tuple(replace(launch, source=launch.source or source) for launch in self.launches)


Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Tactic:
    """One implementation of an op.

    Attributes:
        name: unique within the op.
        source: file name of the CUDA source in `plugins/kernels/` of those launches that name none.
        refuse: (attrs, bound input specs, target) -> a sentence why not, or None. Input specs
            are those after packing.
        plan: (attrs, bound input specs, target) -> Plan.
        cost: (attrs, bound input specs, target) -> predicted seconds; chooses where no GPU is.
        reduction: (attrs, bound input specs, target) -> key of the reduction order: equal keys
            give a token bit-identical results in any batch. None: the result depends on the
            token's place in its batch. Where it is not given, the key is the tactic's name: one
            order for any number of rows.
        why: what it is for, where no published bucket chose it by a recorded time.
        form: equal for tactics that differ in sizes alone.
        size: (attrs, bound input specs, target) -> (size, tokens) of recorded times, or None.
    """

    name: str
    source: str
    refuse: Callable[[Attrs, Specs, Target], str | None]
    plan: Callable[[Attrs, Specs, Target], Plan]
    cost: Callable[[Attrs, Specs, Target], float]
    reduction: Callable[[Attrs, Specs, Target], str | None] | None = None
    why: str = ""
    form: str = ""
    size: Callable[[Attrs, Specs, Target], tuple[int, int] | None] = lambda *node: None

    def reduction_key(self, attrs: Attrs, specs: Specs, target: Target) -> str | None:
        return self.name if self.reduction is None else self.reduction(attrs, specs, target)


@dataclass(frozen=True)
class Pack:
    """How a weight is laid out for the kernels: once, at build, the same for all tactics.

    Attributes:
        infer: (attrs, the weight's spec as docs/graph.md has it) -> the packed spec.
        apply: (attrs, array) -> the packed array; numpy only.
        op: the op after which the packed weight is named, where several have this layout of it.
        attrs: the attributes that infer and apply read; they are given no other.
    """

    infer: Callable[[Attrs, TensorSpec], TensorSpec]
    apply: Callable[[Attrs, Array], Array]
    op: str = ""
    attrs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cuda:
    """The CUDA side of an op: tactics in order of preference, packed operands by name."""

    tactics: tuple[Tactic, ...] = ()
    packs: Mapping[str, Pack] = field(default_factory=dict)
