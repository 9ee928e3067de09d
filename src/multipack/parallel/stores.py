"""The store through which the processes of a run meet: on which address it listens.

torch's stores have no password, and by default they listen on every address of the host. Where all processes are on one
host, the store gets a socket that listens on its loopback address alone.
"""

from __future__ import annotations

import ipaddress
import os
import socket


def is_loopback(host: str) -> bool:
    """Whether a host is written as a loopback address, so that only processes of this host can reach it.

    Names other than localhost are not resolved: /etc/hosts often has this host's name as 127.0.1.1, while other hosts
    know it by an address of their network.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_socket(host: str, port: int) -> int | None:
    """The descriptor of a listening socket for a store, which takes it over; None unless `host` is a loopback address.

    Port 0 is a free one.

    Raises:
        OSError: the port is taken.
    """
    if not is_loopback(host):
        return None
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        return listener.detach()


def keep_gloo_here(host: str) -> None:
    """Let gloo listen on the loopback interface if the store does, unless the user chose an interface."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    if name and is_loopback(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
