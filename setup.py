"""The packages: every folder of a room, under the name that it is imported by (pyproject.toml)."""

from setuptools import find_packages, setup

ROOMS = ("bench", "builder", "check", "models", "plugins", "runtime")
FOUND = find_packages(include=[pattern for room in ROOMS for pattern in (room, f"{room}.*")])

setup(packages=["spark_engine", *(f"spark_engine.{name}" for name in FOUND)])
