"""Ray's settings, read when it is imported and inherited by its processes; without Ray its tests are left out."""

import os
import secrets
from importlib.util import find_spec

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # addresses of nodes are 127.0.0.1, and so are ports
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Waits that only a hung machine needs: Ray's own of 15 to 60 s are too short for a busy one.
os.environ |= {"RAY_raylet_start_wait_time_s": "600", "RAY_gcs_server_port_wait_time_s": "600"}
os.environ |= {"RAY_worker_register_timeout_seconds": "600", "RAY_agent_register_timeout_ms": "600000"}
os.environ["RAY_AUTH_MODE"] = "token"  # Serve binds a port of each replica to all addresses
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

collect_ignore = [] if find_spec("ray") else ["test_failures.py", "test_one_node.py"]
