"""The weather as a typed answer, and as a tool, in environments that have pydantic."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

City = Literal["Paris", "Oslo", "Rome"]


class Report(BaseModel):
    """The weather."""

    # else an answer may hold more, and this model does not end it
    model_config = ConfigDict(extra="forbid")
    city: City
    days: int = Field(ge=1, le=7)


def weather(city: City, days: int) -> str:
    """The weather of a city."""
    return f"mild for {days} days in {city}"
