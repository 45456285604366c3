"""Images of prompts: files and URLs become resized pixels. Knows Pillow, no server."""
