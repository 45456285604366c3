"""The embedded tiny model's checkpoint; `training/` made it."""
