"""Replicas placed by Ray Serve: machine, GPU, liveness, number.

The only file that knows Ray. Requests do not pass through Ray: each replica is a server with its
own address, which a directory reports to the fronts (docs/decisions.md gives the reasons). Ray
restarts a directory that dies; meanwhile the fronts use the last known replicas.
"""

import contextlib
import logging
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
from spark_engine.runtime.replicas.directory import LEASE_S, Directory, Heartbeat, Noted, Rows
from spark_engine.runtime.replicas.plan import START_S, ReplicaPlan, check_resources, wanted
from spark_engine.runtime.replicas.server_process import ANSWER_S, ServerProcess
from spark_engine.runtime.server.process.options import ServerOptions

NAMESPACE, DIRECTORY, APPLICATION, DEPLOYMENT = "spark", "spark-directory", "spark", "engine"
HEALTH_S = 2.0  # between two health checks by Ray
STARTS = 3  # failed starts of a replica after which the placement fails
DRAIN_MORE_S = 15.0  # in addition to the server's drain
REMOVE_MORE_S = 30.0  # in addition to that, until the replicas have ended or are killed
HEARTBEAT_S = 2.0  # time limit of the directory's answer, and heartbeat interval
FRONTS_S = 2.5  # time until the fronts know that a replica leaves
SCALE_UP_S, SCALE_DOWN_S, LOOK_BACK_S = 10.0, 300.0, 30.0
STORE = 128 << 20  # bytes of Ray's object store, which is unused

log = logging.getLogger(__name__)


class EngineReplica:
    """One replica as a Ray Serve deployment: a server in a separate process."""

    def __init__(self, folder: str, server: bytes) -> None:
        options = msgspec.json.decode(server, type=ServerOptions)
        self._drain_s = options.drain_timeout_s
        self._child = child = ServerProcess(
            folder, replace(options, host=options.host or str(ray.util.get_node_ip_address()))
        )
        child.wait(START_S)
        self._name = name = str(serve.get_replica_context().replica_id.unique_id)

        def report(plan: Noted) -> Noted:
            if not child.health():
                return plan
            answer = _made().register.remote(name, child.url, plan)
            newest: Noted = ray.get(answer, timeout=HEARTBEAT_S)
            return newest

        self._heartbeat = Heartbeat(report, HEARTBEAT_S)  # works without Ray's controller

    def check_health(self) -> None:
        """Raises if the server ended or is unresponsive; it restarts its engine itself."""
        if words := self._child.ended:
            raise RuntimeError(words)
        if not self._child.health():
            raise RuntimeError(f"{self._child.url} does not answer")

    def record_autoscaling_stats(self) -> dict[str, float]:
        status, body = self._child.get("/load")
        return {"requests": float(msgspec.json.decode(body)["server_load"]) if status == 200 else 0}

    def __del__(self) -> None:
        """Leaves the directory, so that no request arrives, then drains the server."""
        child = getattr(self, "_child", None)
        if child is None:
            return
        if heartbeat := getattr(self, "_heartbeat", None):
            heartbeat.stop(ANSWER_S + HEARTBEAT_S)
            with contextlib.suppress(Exception):
                ray.get(_found().drop.remote(self._name), timeout=HEARTBEAT_S)
                time.sleep(FRONTS_S)
        child.stop(self._drain_s + DRAIN_MORE_S / 2)

    async def __call__(self) -> str:
        return self._child.url


class ByQueue:
    """Scales the replicas by the running and waiting requests."""

    def __init__(self, plan: str) -> None:
        self._plan = msgspec.json.decode(plan, type=ReplicaPlan)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """(number of replicas, no state)."""
        found = (context.aggregated_metrics or {}).get("requests", {})
        return wanted(sum(found.values()), self._plan), {}


@contextlib.contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Ray's cluster: the one at `address`, or a new one on this machine that ends with the block.

    Raises OptionError if there is none.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # disables telemetry
    os.environ.setdefault("RAY_worker_niceness", "0")  # an engine must not run at low priority
    given: dict[str, Any] = {"address": address}
    if address is None:
        given = {"address": "local", "include_dashboard": False, "object_store_memory": STORE}
    try:
        with contextlib.chdir("/"):  # Ray's processes import from the current folder first
            ray.init(**given, namespace=NAMESPACE, logging_level="warning")
    except Exception as error:
        raise OptionError(_no_ray(address, f"{type(error).__name__}: {error}")) from None
    try:
        yield
    finally:
        ray.shutdown()


def _no_ray(address: str | None, why: str) -> str:
    """The error and its remedy if Ray is unavailable."""
    if address is None:
        words = "it stops after about 15 s, which a busy machine may need: run it again"
        return f"Ray does not start on this machine ({why}); {words}"
    words = "check that it runs, with this version of Ray"
    if address != "auto" and "RAY_AUTH_MODE" not in os.environ:
        words += (
            " If its machines have a token (~/.ray/auth_token), set RAY_AUTH_MODE=token here: "
            "Ray uses it automatically only for --ray auto."
        )
    return f"Ray does not answer at {address} ({why}); {words}"


def check_free() -> None:
    """Raises OptionError if this cluster has replicas already."""
    if APPLICATION in serve.status().applications:
        words = "spark-replicas update and scale change them, front serves them, remove ends"
        raise OptionError(f"replicas are placed in this cluster already: {words} them")


def place(plan: ReplicaPlan) -> None:
    """Starts the replicas; returns when they accept requests. Raises CapacityError."""
    _check_capacity(plan)
    _put(plan)
    _note(plan)


def _check_capacity(plan: ReplicaPlan) -> None:
    """Raises CapacityError if replicas can never be placed; warns if they may wait."""
    try:
        check_resources(plan, ray.cluster_resources())
    except CapacityError as error:
        if plan.known:
            raise
        log.warning("%s; waiting until the cluster has more", error)


def _note(plan: ReplicaPlan) -> None:
    ray.get(_made().note.remote(msgspec.json.encode(plan)))


def _put(plan: ReplicaPlan) -> None:
    """Places the plan with Ray, or changes the placed one: Ray replaces the replicas one after the
    other if the engine or the options differ, and none if only numbers do.

    Raises CapacityError; then the earlier replicas are still placed, at least some of them.
    """
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
        EngineReplica,
        name=DEPLOYMENT,
        ray_actor_options={"num_gpus": plan.gpus, "num_cpus": plan.cpus},
        health_check_period_s=HEALTH_S,
        graceful_shutdown_timeout_s=plan.server.drain_timeout_s + DRAIN_MORE_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=STARTS,
        **how,
    )
    # without a version Ray generates one each time, and replaces every replica
    deployment = deployment.options(version=plan.version, _internal=True)
    try:
        bound = deployment.bind(plan.folder, msgspec.json.encode(plan.server))
        serve.run(bound, name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        raise CapacityError(f"the replicas do not start: {error}") from None


def change(edit: Callable[[ReplicaPlan], ReplicaPlan]) -> None:
    """Places the result of `edit` on the current plan; if that fails, places the old plan again.
    The directory records it first: Ray continues it. Raises OptionError, CapacityError."""
    old = placed()
    new = edit(old)
    _check_capacity(new)
    _note(new)
    try:
        _put(new)
    except CapacityError as error:
        _note(old)
        _put(old)
        raise CapacityError(f"{error}\n{old.folder} is placed as before") from None


def placed() -> ReplicaPlan:
    """The plan of this cluster. Raises OptionError if there is none."""
    end = time.monotonic() + LEASE_S  # a new directory has received it by then
    while APPLICATION in serve.status().applications:
        if found := _noted():
            return found
        if time.monotonic() > end:
            words = "the replicas are being placed for the first time: try again later, or, if "
            raise OptionError(words + "the run that places them has ended, remove them")
        time.sleep(HEALTH_S / 4)
    raise OptionError("this cluster has no replicas: start with spark-replicas run")


def states() -> dict[str, int]:
    application = serve.status().applications.get(APPLICATION)
    found = application.deployments.get(DEPLOYMENT) if application else None
    return (
        {str(getattr(k, "value", k)): n for k, n in found.replica_states.items()} if found else {}
    )


def remove() -> None:
    """Ends all replicas after their drain, and removes the application from the cluster."""
    drain_s = (plan.server if (plan := _noted()) else ServerOptions()).drain_timeout_s
    with contextlib.ExitStack() as last:  # runs even after an error; the directory ends last
        last.callback(_kill_directory)
        last.callback(_end_serve)
        with contextlib.suppress(Exception):
            ray.get(_found().note.remote(b""), timeout=HEARTBEAT_S)
        if APPLICATION not in serve.status().applications:
            return
        serve.delete(APPLICATION, _blocking=False)
        end = time.monotonic() + drain_s + REMOVE_MORE_S
        while APPLICATION in serve.status().applications:
            if time.monotonic() > end:
                log.warning("some replicas did not end within %.0f s", drain_s + REMOVE_MORE_S)
                return
            time.sleep(HEALTH_S / 4)


def _end_serve() -> None:
    if not serve.status().applications.keys() - {APPLICATION}:  # other applications may be running
        serve.shutdown()


def _kill_directory() -> None:
    with contextlib.suppress(ValueError):
        ray.kill(_found())


def named() -> tuple[Rows, bool]:
    """The directory's list of replicas, for a front's `Members`. Blocks."""
    try:
        directory = _found()
    except ValueError:  # no replica has started the directory yet
        return (), True
    rows: tuple[Rows, bool] = ray.get(directory.names.remote(), timeout=HEARTBEAT_S)
    return rows


def _noted() -> ReplicaPlan | None:
    try:
        data = ray.get(_found().plan.remote(), timeout=HEARTBEAT_S)
    except (ValueError, TimeoutError, ray.exceptions.RayError):
        return None
    return msgspec.json.decode(data, type=ReplicaPlan) if data else None


def _found() -> Any:
    """The directory. Raises ValueError if there is none; readers do not create one."""
    return ray.get_actor(DIRECTORY, namespace=NAMESPACE)


def _made() -> Any:
    """The directory, created if there is none."""
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Directory)
    return actor.options(
        name=DIRECTORY, namespace=NAMESPACE, lifetime="detached", get_if_exists=True
    ).remote()
