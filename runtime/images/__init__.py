"""Images of prompts: from encoded files to resized pixels. Knows Pillow, no server."""
