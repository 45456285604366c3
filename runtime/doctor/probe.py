"""A second of work on the GPU: measures the multiprocessors' clock and the memory bandwidth.

Uses the driver through `Gpu`, and one PTX kernel that the driver compiles, so that it needs neither
an engine nor a compiler. Run on an H200, not on a GB10.
"""

import time
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from spark_engine.device.gpu import Gpu
from spark_engine.device.resources import DeviceResources
from spark_engine.kernel import Shape

SECONDS = 1.0  # of arithmetic: a GPU leaves its idle clocks only after some time
ROUNDS = 1 << 17  # iterations of one launch: some milliseconds
THREADS, BLOCKS = 256, 4  # threads of a block; blocks per multiprocessor
COPY = 256 << 20  # bytes of a copy: more than any card's L2 cache
NEEDS = 4 * COPY  # free bytes that it needs
COPIES, BATCHES = 8, 5  # copies of a measurement; measurements, of which the best counts
# Chained multiply-adds; the first thread stores cycles and nanoseconds.
SPIN = """
.version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 result, .param .u32 rounds)
{
    .reg .pred %p<4>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<6>;
    .reg .f32 %f<3>;
    ld.param.u64 %rd1, [result];
    ld.param.u32 %r1, [rounds];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    cvt.rn.f32.u32 %f1, %r2;
    mov.f32 %f2, 0f3F7FFFFE;
    bar.sync 0;
    mov.u64 %rd2, %clock64;
    mov.u64 %rd3, %globaltimer;
AGAIN:
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    mov.u64 %rd4, %clock64;
    mov.u64 %rd5, %globaltimer;
    sub.u64 %rd4, %rd4, %rd2;
    sub.u64 %rd5, %rd5, %rd3;
    or.b32 %r2, %r2, %r3;
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra DONE;
    cvta.to.global.u64 %rd1, %rd1;
    st.global.u64 [%rd1], %rd4;
    st.global.u64 [%rd1+8], %rd5;
DONE:
    setp.neu.f32 %p3, %f1, 0f7F800000;
    @%p3 bra LEAVE;
    cvta.to.global.u64 %rd1, %rd1;
    st.global.f32 [%rd1+16], %f1;
LEAVE:
    ret;
}
"""


@dataclass(frozen=True)
class Probe:
    """The multiprocessors' MHz at the end of the load, and the bytes a second that copies within
    the device's memory read and wrote together."""

    sm_mhz: float
    bandwidth: float


def probe(gpu: Gpu, seconds: float = SECONDS) -> Probe:
    """Runs a load for this many seconds. Raises ExecutorError, and CapacityError if memory is
    short."""
    with closing(DeviceResources(gpu)) as held:
        mhz = _clock(gpu, held, seconds)
        return Probe(mhz, _bandwidth(gpu, held))


def _clock(gpu: Gpu, held: DeviceResources, seconds: float) -> float:
    result, found = held.zeros(32), held.pinned(16).view(np.uint64)
    function = gpu.load(SPIN.encode() + b"\0", ["spin"])["spin"]
    shape = Shape((BLOCKS * gpu.multiprocessors, 1, 1), (THREADS, 1, 1), ("address", "i32"))
    work = gpu.prepare(function, shape, (result, ROUNDS))
    end, mhz = time.monotonic() + seconds, 0.0
    while not mhz or time.monotonic() < end:
        work()
        gpu.download(found, result)
        gpu.wait()
        cycles, nanoseconds = (int(number) for number in found)
        mhz = 1000 * cycles / max(nanoseconds, 1) or 1e-9
    return mhz


def _bandwidth(gpu: Gpu, held: DeviceResources) -> float:
    to, source = held.zeros(COPY), held.zeros(COPY)
    first, last = held.event(timed=True), held.event(timed=True)
    best = 0.0
    for _ in range(BATCHES):
        gpu.record(first)
        for _ in range(COPIES):
            gpu.copy(to, source, COPY)
        gpu.record(last)
        gpu.wait_for(last)
        best = max(best, 2 * COPIES * COPY / max(gpu.milliseconds(first, last), 1e-6) * 1000)
    return best
