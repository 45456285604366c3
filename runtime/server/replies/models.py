"""/v1/models: the names that the engine is served under."""

from spark_engine.runtime.engine.request import capacity
from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.api.fields import UnknownModel
from spark_engine.runtime.server.service.service import Service


def models(service: Service) -> Json:
    return {"object": "list", "data": [_row(service, name) for name in service.names]}


def model(service: Service, name: str) -> Json:
    """One of them. Raises UnknownModel."""
    if name not in service.names:
        raise UnknownModel(f"model {name!r} is not served here", "model", "model_not_found")
    return _row(service, name)


def _row(service: Service, name: str) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "spark",
        "root": service.info.name,
        "parent": None,
        "max_model_len": capacity(service.info.limits),
    }
