"""A Ray cluster of this machine alone, as a program: it lives until its standard input is closed.

    python tests/deploy/ray_cluster.py TEMP_DIR HTTP_PORT

The address of the cluster is the first line that it prints. The application that a line of its input names is deleted,
once its requests have ended, and then the line is printed. Ray prints lines of its own between them.
"""

import sys

import ray
from ray import serve

NUM_CORES = 2
OBJECT_STORE_BYTES = 100 * 2**20


def main(temp_dir: str, http_port: str) -> None:
    """Start the cluster with Ray Serve's proxy on the port, and stop both at the end."""
    context = ray.init(
        address="local",
        num_cpus=NUM_CORES,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=temp_dir,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(http_port)}, proxy_location="HeadOnly")
    print(context.address_info["gcs_address"], flush=True)
    for line in sys.stdin:
        serve.delete(line.strip())
        print(line, end="", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
