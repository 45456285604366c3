"""Replicas placed by Ray Serve: on which machine, on which GPU, whether they live, how many.

Knows Ray, and no other file does. Requests do not go through it: each replica is a server at an
address of its own, which a directory tells to the fronts (docs/decisions.md says why). Ray starts a
directory that dies again; until it is there the fronts go on with what they know.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from spark_engine.errors import CapacityError, OptionError
from spark_engine.runtime.replicas.child import Child
from spark_engine.runtime.replicas.directory import LEASE_S, NOTHING, Directory, Rows
from spark_engine.runtime.replicas.plan import START_S, Plan, check_room, wanted
from spark_engine.runtime.server.server import ServerOptions

NAMESPACE, DIRECTORY, APPLICATION, DEPLOYMENT = "spark", "spark-directory", "spark", "engine"
HEALTH_S = 2.0  # between two looks of Ray's at a replica
STARTS = 3  # of a replica that fails, after which the placing has failed
DRAIN_MORE_S = 15.0  # beyond the server's own drain
TELL_S = 2.0  # for the directory's answer
FRONTS_S = 2.5  # in which the fronts have heard that a replica leaves
SCALE_UP_S, SCALE_DOWN_S, LOOK_BACK_S = 10.0, 300.0, 30.0
STORE = 128 << 20  # bytes of Ray's object store, of which nothing is used


class Engine:
    """One replica, as Ray Serve keeps it: a server in a process of its own."""

    def __init__(self, folder: str, server: bytes) -> None:
        options = msgspec.json.decode(server, type=ServerOptions)
        self._drain_s = options.drain_timeout_s
        self._plan = NOTHING
        self._child = Child(folder, replace(options, host=options.host or address_here()))
        self._child.wait(START_S)
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self.check_health()

    def check_health(self) -> None:
        """Raises where the server is gone or silent. It starts its engine again by itself."""
        if words := self._child.ended:
            raise RuntimeError(words)
        if not self._child.health():
            raise RuntimeError(f"{self._child.url} does not answer")
        with contextlib.suppress(Exception):  # a directory that is away makes nobody ill
            telling = _directory().hear.remote(self._name, self._child.url, self._plan)
            self._plan = ray.get(telling, timeout=TELL_S)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Requests that run or wait."""
        status, body = self._child.get("/load")
        return {"requests": float(msgspec.json.decode(body)["server_load"]) if status == 200 else 0}

    def __del__(self) -> None:
        """Out of the directory first, so that no more comes; then the server drains."""
        child = getattr(self, "_child", None)
        if child is None:
            return
        with contextlib.suppress(Exception):
            ray.get(_directory().drop.remote(self._name), timeout=TELL_S)
            time.sleep(FRONTS_S)
        child.stop(self._drain_s + DRAIN_MORE_S / 2)

    async def __call__(self) -> str:
        """Where it is."""
        return self._child.url


class ByQueue:
    """As many replicas as all requests ask for that run or wait."""

    def __init__(self, plan: str) -> None:
        self._plan = msgspec.json.decode(plan, type=Plan)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """(replicas, no state)."""
        found = (context.aggregated_metrics or {}).get("requests", {})
        return wanted(sum(found.values()), self._plan), {}


@contextlib.contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Ray's cluster: the one at `address`, or one of this machine alone, which ends with the block.

    Raises OptionError where there is none.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is phoned
    os.environ.setdefault("RAY_worker_niceness", "0")  # an engine is no work for spare moments
    given: dict[str, Any] = {"address": address}
    if address is None:
        given = {"address": "local", "include_dashboard": False, "object_store_memory": STORE}
    try:
        ray.init(**given, namespace=NAMESPACE, logging_level="warning")
    except Exception as error:
        where = address or "on this machine"
        words = f"Ray does not answer {where} ({type(error).__name__}: {error})"
        raise OptionError(f"{words}; see --ray") from None
    try:
        yield
    finally:
        ray.shutdown()


def check_free() -> None:
    """Raises OptionError where this cluster has replicas already."""
    if APPLICATION in serve.status().applications:
        words = "spark-replicas update and scale change them, front stands before them, remove ends"
        raise OptionError(f"replicas are placed in this cluster already: {words} them")


def place(plan: Plan, known: bool) -> None:
    """Starts the replicas, or changes what was placed: one after the other where the engine or the
    options differ. Returns when they take requests. `known`: the machines will not become more.

    Raises CapacityError; then what was there before is there still, in part.
    """
    if known:
        check_room(plan, ray.cluster_resources())
    data = msgspec.json.encode(plan)
    serve.start(proxy_location="Disabled")
    how: dict[str, Any] = {"num_replicas": plan.least}
    if plan.scales:
        policy = AutoscalingPolicy(policy_function=ByQueue, policy_kwargs={"plan": data.decode()})
        how = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=plan.least,
                max_replicas=plan.most,
                upscale_delay_s=SCALE_UP_S,
                downscale_delay_s=SCALE_DOWN_S,
                look_back_period_s=LOOK_BACK_S,
                policy=policy,
            )
        }
    deployment = serve.deployment(
        Engine,
        name=DEPLOYMENT,
        ray_actor_options={"num_gpus": plan.gpus, "num_cpus": plan.cpus},
        health_check_period_s=HEALTH_S,
        graceful_shutdown_timeout_s=plan.server.drain_timeout_s + DRAIN_MORE_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=STARTS,
        **how,
    )
    try:
        # what differs here has every replica replaced; numbers do not
        bound = deployment.bind(plan.folder, msgspec.json.encode(plan.server))
        serve.run(bound, name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        raise CapacityError(f"the replicas do not start: {error}") from None
    ray.get(_directory().note.remote(data))


def change(edit: Callable[[Plan], Plan]) -> None:
    """Places what `edit` makes of what is placed; where that fails, what was placed again. Raises
    OptionError, CapacityError."""
    old = placed()
    try:
        place(edit(old), known=False)
    except CapacityError as error:
        place(old, known=False)
        raise CapacityError(f"{error}\n{old.folder} is placed as before") from None


def placed() -> Plan:
    """What is placed in this cluster. Raises OptionError where nothing is."""
    end = time.monotonic() + LEASE_S  # a new directory has heard of it by then
    while APPLICATION in serve.status().applications:
        if data := ray.get(_directory().plan.remote()):
            return msgspec.json.decode(data, type=Plan)
        if time.monotonic() > end:
            raise OptionError("the replicas are being placed for the first time; ask again later")
        time.sleep(HEALTH_S / 4)
    raise OptionError("nothing is placed in this cluster: begin with spark-replicas run")


def states() -> dict[str, int]:
    """How many replicas are in which state, as Ray sees them."""
    application = serve.status().applications.get(APPLICATION)
    found = application.deployments.get(DEPLOYMENT) if application else None
    return (
        {str(getattr(k, "value", k)): n for k, n in found.replica_states.items()} if found else {}
    )


def remove() -> None:
    """Ends all replicas; they drain. Nothing of ours stays in the cluster."""
    ray.get(_directory().note.remote(b""))
    if APPLICATION in serve.status().applications:
        serve.delete(APPLICATION)
    if not serve.status().applications:
        serve.shutdown()
    ray.kill(_directory())


def named() -> tuple[Rows, bool]:
    """What the directory answers, for a front's `Members`. Blocks."""
    rows: tuple[Rows, bool] = ray.get(_directory().names.remote(), timeout=TELL_S)
    return rows


def address_here() -> str:
    """The address of this machine that the others of the cluster know."""
    return str(ray.util.get_node_ip_address())


def _directory() -> Any:
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Directory)
    return actor.options(
        name=DIRECTORY, namespace=NAMESPACE, lifetime="detached", get_if_exists=True
    ).remote()
