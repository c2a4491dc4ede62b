"""A Ray cluster of three nodes on this machine, one CPU each: ``python -m tests.rollout.ray_nodes FOLDER``.

Says where it is in one line, {"address": ..., "raylets": [pid, ...]} with the head's first, and ends with its input.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}


def main() -> None:
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)  # where Ray notes a cluster's address, and expects a folder
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "temp_dir": sys.argv[1]})
    try:
        nodes = [cluster.head_node, *(cluster.add_node(wait=False, **NODE) for _ in range(2))]
        cluster.wait_for_nodes()
        raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
        sys.stdout.write(json.dumps({"address": cluster.address, "raylets": raylets}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
