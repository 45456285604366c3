"""Two ranks on two GPUs of one host as on two hosts: NCCL over sockets, without peer or shared
memory.

Results equal, bit for bit, those of ranks that read each other's memory. A late rank is waited for;
a failed rank ends the group, which starts again.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from spark_engine.builder.build import build
from spark_engine.errors import ExecutorError
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.ranks.spawn import RankSpec, start_rank
from tests.checkpoints import write_checkpoint
from tests.device.on_gpu import on_gpu
from tests.ports import free_port
from tests.runtime import small_tokenizer
from tests.runtime.random_engines import heard
from tests.runtime.ranks.test_rank_processes import gone
from tests.runtime.ranks.test_rank_server import lose_and_come_back
from tests.runtime.ranks.test_ranks_gpu import CONFIG, OPTIONS, crowd, serve

pytestmark = [
    *on_gpu(gpus=2),
    pytest.mark.skipif(find_spec("nccl") is None, reason="needs the extra `nccl`"),
]
SOCKETS = {  # disables NVLink, shared host memory and multicast
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "=lo",
}
LATE_S = 1.5


@pytest.fixture(scope="module", autouse=True)
def sockets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SOCKETS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """An invariant engine of two ranks, on one host and across hosts."""
    base = tmp_path_factory.mktemp("hosts")
    write_checkpoint(base / "checkpoint", CONFIG, "nvfp4", moe=True)
    small_tokenizer.write(base / "checkpoint")
    made = {}
    for across in (False, True):
        options = replace(OPTIONS, tp=2, across_hosts=across)
        made[across] = base / f"across-{across}"
        build(base / "checkpoint", made[across], options, print)
    return made


@contextmanager
def two_hosts(path: Path) -> Iterator[tuple[Engine, subprocess.Popen[bytes]]]:
    """Rank 0 in this process on the first GPU, and a process on the second that connects over
    sockets."""
    hosts = (f"127.0.0.1:{free_port()}", "127.0.0.1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "1")
        process = start_rank(RankSpec(str(path), 1, 2, hosts=hosts, parent=os.getpid()))
    try:
        with closing(Engine.open(path, EngineOptions(seed=1, hosts=",".join(hosts)))) as engine:
            yield engine, process
        process.wait(10)
    finally:
        process.kill()
        process.wait()


def test_hosts_say_bit_for_bit_what_one_host_says(engines: dict[bool, Path]) -> None:
    """64 requests of several lengths with drafts and the prefix cache, and 8 of them alone."""
    asked = crowd()
    with closing(Engine.open(engines[False], EngineOptions(seed=1))) as engine:
        want = [heard(events) for events in serve(engine, asked)]
    with two_hosts(engines[True]) as (engine, process):
        assert [heard(events) for events in serve(engine, asked)] == want
        engine.clear_cache()
        alone = [heard(serve(engine, [one])[0]) for one in asked[:8]]
    assert alone == want[:8]
    assert process.returncode == 0


def test_a_late_rank_is_waited_for(engines: dict[bool, Path]) -> None:
    with two_hosts(engines[True]) as (engine, process):
        asked = crowd()[:8]
        want = [heard(events) for events in serve(engine, asked)]
        engine.clear_cache()
        for one in asked[:1]:
            engine.submit(one)
        engine.step()
        os.kill(process.pid, signal.SIGSTOP)
        subprocess.Popen(["sh", "-c", f"sleep {LATE_S}; kill -CONT {process.pid}"])
        begin = time.monotonic()
        while not engine.idle:
            engine.step()
        assert time.monotonic() - begin > LATE_S / 2
        engine.clear_cache()
        assert [heard(events) for events in serve(engine, asked)] == want


def test_a_lost_rank_is_named_and_the_group_ends(engines: dict[bool, Path]) -> None:
    """Processes of one host, connected by NCCL too."""
    with closing(Engine.open(engines[True], EngineOptions())) as engine:
        assert engine.loaded.group is not None
        pids = engine.loaded.group.pids
        for one in crowd():
            engine.submit(one)
        for _ in range(3):
            engine.step()
        os.kill(pids[1], signal.SIGKILL)
        time.sleep(1)
        with pytest.raises(ExecutorError, match="rank 1 is gone"):
            engine.step()
    assert gone(pids.values())


def test_two_hosts_serve_and_one_comes_back(engines: dict[bool, Path], tmp_path: Path) -> None:
    lose_and_come_back(engines[True], tmp_path, "--device", "1")
