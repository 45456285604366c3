"""How a server is run. Imports no HTTP library: the command line reads it for every mode."""

from dataclasses import dataclass

from spark_engine.runtime.engine.options import EngineOptions
from spark_engine.runtime.server.operation.logs import LogFormat, LogLevel
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.server.prompts.limits import MAX_BODY


@dataclass(frozen=True)
class ServerOptions:
    """How to serve. Times in seconds; `timeout_s` None: requests may take as long as they like.

    Attributes:
        drain_timeout_s: time for requests in flight after SIGTERM; then they are cancelled.
        watchdog_s: silence, or work without a step, after which the engine process is restarted;
            0: never; None: the default of the engine's executor.
        dumps: the folder for dumps of both processes; None: the system's temporary one.
        access_log: whether every request has a line in the log, except successful probes,
            scrapes and the page's polling; `access_log_all`: those too.
        cors_origins: pages of these may use the server from a browser; `*`: of all.
        allowed_hosts: names by which the server may be called; `*`: any. Empty: any if it has keys
            or other machines reach it, else localhost or an address.
        chat: how conversations are read: formats of thoughts and calls, a thought's budget.
        engine: how the engine is run; its queue is set from `max_queue`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    names: tuple[str, ...] = ()  # the model's names in requests; empty: the engine's name
    max_queue: int = 256  # requests that may wait beyond those that run
    timeout_s: float | None = None
    queue_timeout_s: float | None = None  # what a request may wait until the engine starts it
    drain_timeout_s: float = 30.0
    watchdog_s: float | None = None
    restarts: int = 5  # restarts within ten minutes, after which the server gives up
    restart_wait_s: float = 60.0  # how long a request may wait for a restart, or a loading engine
    idle_unload_s: float | None = None  # an engine without requests is unloaded after so long
    models_bytes: int | None = None  # that loaded engines may plan together; None: what is free
    dumps: str | None = None
    grace_s: float = 5.0  # how long a server that has given up still answers, before it exits
    allow_priority: bool = False  # requests may set their priority, and so delay others
    max_connections: int = 2048  # connections at a time; fewer where descriptors do not suffice
    read_timeout_s: float = 30.0  # the time for the head of a request, and then for its body
    api_keys: str | None = None  # a file with more keys, each with its limits; reloaded on SIGHUP
    metrics_by_key: bool = False  # /metrics also counts by the names of keys, and needs a key
    max_model_len: int | None = None  # tokens of a request; None: the engine's maximum
    max_body_mib: int = MAX_BODY >> 20  # the largest body
    access_log: bool = False
    access_log_all: bool = False
    log_format: LogFormat = LogFormat.TEXT
    log_level: LogLevel = LogLevel.INFO
    traces: str | None = None  # URL of an OpenTelemetry collector
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    tls_cert: str | None = None  # a certificate in PEM form, with its chain; None: plain HTTP
    tls_key: str | None = None  # the certificate's key, in PEM form without a password
    page: bool = True  # serve the page at `/`
    chat: ChatOptions = ChatOptions()
    engine: EngineOptions = EngineOptions()
