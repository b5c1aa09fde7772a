"""Ray's settings, read when it is imported and inherited by its processes; without Ray its tests are left out."""

import os
import secrets
from importlib.util import find_spec

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # addresses of nodes are 127.0.0.1, and so are ports
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "token"  # Serve binds a port of each replica to all addresses
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

collect_ignore = [] if find_spec("ray") else ["test_failures.py", "test_one_node.py"]
