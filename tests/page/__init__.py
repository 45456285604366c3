"""The page in a real browser, over a real server with a scripted engine: `make page`."""
