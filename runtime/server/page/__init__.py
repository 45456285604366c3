"""The page at `/`: its files, which the browser runs, and the engine's report, which it shows."""
