"""`ModelFamily`: the package's description of a model family, a row of the registry.

The tensors that a file must hold, the table of what is quantised, random checkpoints and the graphs
are derived from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from spark_engine.models.checkpoint.tensor_list import Row, tensors_of
from spark_engine.models.config.json_values import Json
from spark_engine.models.config.model_config import ModelConfig
from spark_engine.models.graph.decoder import Decoder
from spark_engine.models.graph.draft_head import DraftHead
from spark_engine.models.graph.vision_tower import VisionTower

C = TypeVar("C", bound=ModelConfig)
NO_DRAFT_HEAD = "networks of this model type have no draft head"
NO_TOWER = "networks of this model type read no images"


@dataclass(frozen=True)
class ModelFamily(Generic[C]):
    """A kind of network with its configuration and the names of its tensors."""

    name: str  # the folder's name, and `ModelConfig.model_type`
    model_types: tuple[str, ...]  # its values of `model_type` in config.json
    architectures: tuple[str, ...]  # its values of `architectures` in config.json
    # Converts config.json and generation_config.json to a frozen dataclass.
    read_config: Callable[[Json, Json], C]
    network: Callable[[C], Decoder]  # its blocks, each with its tensors' names and shapes
    # The draft head's blocks, or the reason why there is none.
    draft_head: Callable[[C], DraftHead | str] = lambda config: NO_DRAFT_HEAD
    # The vision tower's blocks, or the reason why there is none.
    tower: Callable[[C], VisionTower | str] = lambda config: NO_TOWER
    # The prefixes of names of each part that files may lack.
    ignored_prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacks_experts: bool = True  # its exporters stack unquantised experts

    def tensors(self, config: C) -> tuple[Row, ...]:
        """Every tensor of a checkpoint, in the order of the network, then those of the tower."""
        return (*tensors_of(self.network(config)), *tensors_of(self.tower(config)))

    def draft_tensors(self, config: C) -> tuple[tuple[Row, ...], str]:
        """Every tensor of the draft head and ""; or none, and why."""
        head = self.draft_head(config)
        return ((), head) if isinstance(head, str) else (tuple(tensors_of(head)), "")
