"""The health check of the container images: `python healthcheck.py PATH`, exit code 0 only for an answer of 200."""

import sys
from http.client import HTTPConnection

SECONDS = 5.0


def main(path: str, port: int = 8000) -> int:
    """Ask the server of this container for a path, past any proxy that the environment names."""
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except OSError as problem:
        print(f"healthcheck: no answer from port {port}: {problem}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    print(f"healthcheck: {path} answered {status}")
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:3])))
