"""train.py on the host whose address is the first word.

Ray finds the node of a driver among all processes it sees, and on one machine it sees those of all hosts.
"""

import runpy
import sys

import ray

from tests.cluster.ray_cluster import ROOT

if __name__ == "__main__":
    address = sys.argv.pop(1)
    ray.init(address="auto", _node_ip_address=address, log_to_driver=False, logging_level="warning")
    sys.exit(runpy.run_path(str(ROOT / "train.py"))["main"]())
