"""Ports of this machine: one that is free, or whether a wanted one is.

What was free a moment ago may be taken when it is used: whoever starts a server says so then.
"""

import socket

from service.errors import Conflict


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raise Conflict when a port is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Conflict(f"Port {port} on {host} is taken: choose another with --port") from error
