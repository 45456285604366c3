"""The image's health check: exits with 0 while the server on this host answers /health with 200.

The server speaks HTTP, or HTTPS with --tls-cert; its certificate names another host than this one,
so it is not verified here. `python healthcheck.py [PORT]`.
"""

import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 2.0


def answer(port: int) -> str:
    """Why the server is not healthy; empty where it is."""
    why = ""
    for scheme in ("http", "https"):
        url = f"{scheme}://127.0.0.1:{port}/health"
        context = ssl._create_unverified_context() if scheme == "https" else None
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context):
                return ""
        except urllib.error.HTTPError as error:  # it speaks this scheme: the other is not tried
            return f"{url}: status {error.code}"
        except (OSError, ValueError, urllib.error.URLError) as error:
            why = f"{url}: {error}"
        except Exception as error:  # http.client's, for an answer that is no HTTP
            why = f"{url}: {type(error).__name__}"
    return why


if __name__ == "__main__":
    sys.exit(answer(int(sys.argv[1]) if len(sys.argv) > 1 else 8000) or 0)
